"""When a new attention backend may go on with the pages of the old one."""

from dataclasses import replace

import pytest

from hotswap.core.engine.exchange import shares_pages
from hotswap.core.interfaces.attention import HND, NHD
from hotswap.core.interfaces.component import Origin
from hotswap.plugins.attention.torch_sdpa import TorchAttention


def backend(name, layouts, pages=""):
    class Backend(TorchAttention):
        def support(self):
            return replace(
                super().support(), layouts=layouts, needs_clean_pages="needs" in pages,
                leaves_clean_pages="leaves" in pages)

    component = Backend()
    component.origin = Origin("attention", name, "d", "1", "attention/1")
    return component


@pytest.mark.parametrize(("old", "new", "shared"), [
    (((HND,), ""), ((HND,), ""), True),
    (((HND,), "needs leaves"), ((HND, NHD), ""), True),
    (((HND,), ""), ((HND,), "needs leaves"), False),  # what it reads masked must be numbers
    (((HND,), "leaves"), ((HND,), "needs leaves"), True),
    (((HND,), ""), ((HND,), "leaves"), True),  # it clears what it begins, and needs nothing of the old pages
    (((NHD,), ""), ((HND, NHD), ""), False),  # it could, but prefers another layout, and is not told
    (((NHD,), ""), ((HND,), ""), False),
    (((), ""), ((HND,), ""), False),  # pages of its own
    (((HND,), ""), ((), ""), False),
])
def test_pages_stay_where_both_lay_them_out_alike(old, new, shared):
    assert shares_pages(backend("old", *old), backend("new", *new)) is shared
    assert shares_pages(backend("same", *old), backend("same", *old)), "nothing has changed"
