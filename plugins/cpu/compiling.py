"""How kernels are compiled: all that a kernel calls is optimised, and made machine code of, as a part of it alone.

numba does both to each function by itself, with all that this calls in it, and so to the innermost ones once for every
level of calls; then it optimises twice, to be rid of counts of references, which kernels have none of; and it looks for
loops that could become vectors, which in kernels are such already. That took a third of the time. numba's pipeline is
changed in two places: what is made of a function's LLVM code, a *library*, and the pass that asks for it. These are not
of what numba promises to keep: with a version that nobody has tried, its own pipeline does all, and takes its time.

Imports numba: import this module where a part is bound, and nowhere before.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from collections.abc import Iterator
from typing import Any

import llvmlite.binding as llvm
from numba import _dynfunc, version_info
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering

TRIED = frozenset({(0, 68)})
"""Versions of numba whose pipeline may be changed here."""


class KernelLibrary(JITCodeLibrary):  # type: ignore[misc]  # numba has no annotations
    """The code of a kernel, or of a function that is a part of kernels, which stays as it was written."""

    def add_linking_library(self, library: Any) -> None:
        if not isinstance(library, KernelLibrary):
            library._ensure_finalized()
        self._linking_libraries.append(library)

    def finalize(self) -> None:
        """Of a kernel. Whatever it calls is linked in once, by whatever ways it is called."""
        self._raise_if_finalized()
        for library in dict.fromkeys(self._below()):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._optimize_final_module()
        self._final_module.verify()
        self._finalize_final_module()

    def _below(self) -> Iterator[Any]:
        for library in self._linking_libraries:
            yield library
            if isinstance(library, KernelLibrary):
                yield from library._below()

    def _get_module_for_linking(self) -> Any:
        """As numba's, of what is not finalised, too: several may define these functions, and who inlines them all lets
        them go."""
        module = self._final_module.clone()
        for function in module.functions:
            if not function.is_declaration and function.linkage == llvm.Linkage.external:
                function.linkage = "linkonce_odr"
        return module

    def _optimize_final_module(self) -> None:
        passes = self._codegen._pass_builder(loop_vectorize=False, slp_vectorize=False)
        passes.getModulePassManager().run(self._final_module, passes)


@register_pass(mutates_CFG=True, analysis_only=False)
class KernelLowering(NativeLowering):  # type: ignore[misc]
    """Leaves machine code to the kernel, which is compiled with ``no_compile``: its wrapper in C comes later."""

    _name = "kernel_lowering"

    def run_pass(self, state: Any) -> bool:
        is_kernel, state.flags.no_compile = state.flags.no_compile, True
        state.library = KernelLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        super().run_pass(state)
        if not is_kernel:
            made, library = state["cr"], state.library
            name = made.fndesc.qualname.rpartition(".")[2]
            # Callers find it by what Python would call: here that is nothing.
            nothing = _dynfunc.make_function(made.fndesc.lookup_module(), name, "", 0, made.env, (library,))
            state.targetctx.insert_user_function(nothing, made.fndesc, [library])
            state["cr"] = made._replace(cfunc=nothing)
        return True


class _KernelCompiler(Compiler):  # type: ignore[misc]
    def define_pipelines(self) -> list[Any]:
        [pipeline] = super().define_pipelines()
        pipeline.passes = [
            (KernelLowering if each is NativeLowering else each, what) for each, what in pipeline.passes]
        pipeline.finalize()
        return [pipeline]


def compiler_for(version: tuple[int, int]) -> type[Compiler]:
    """Of kernels and of what they call, with this version of numba."""
    return _KernelCompiler if version in TRIED else Compiler


KernelCompiler = compiler_for(version_info.short)
