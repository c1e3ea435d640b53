"""The config file as models: one class a section, one attribute a key, defaults included.

A section that names a component (``use``) holds core's keys and, beside them, the component's own options. Core does
not look at those: they are validated by the component's ``Options`` when it is built. A bare name stands for a section
with nothing but ``use``.
"""

import hashlib
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, field_validator, model_validator

from hotswap.core.config.units import parse_bytes
from hotswap.core.interfaces.component import ComponentRef, use_by_name

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Bytes = Annotated[
    int, Field(ge=1), BeforeValidator(parse_bytes),
    WithJsonSchema({"type": ["integer", "string"], "description": "Bytes, or a number with a unit such as '4GiB'."}),
]

_DEVICE = re.compile(r"^(auto|[a-z]+(:[0-9]+)?)$")


def _yaml_off(value: Any) -> Any:
    """YAML takes a bare ``off`` for false."""
    return "off" if value is False else value


class Section(BaseModel):
    """Keys are exact and so are types: ``"8000"`` is no port, ``yes`` is no number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class ComponentSection(Section):
    """``use`` names the component. Keys that are not core's are its options."""

    model_config = ConfigDict(extra="allow")

    use: str

    _bare_name = model_validator(mode="before")(use_by_name)

    @property
    def ref(self) -> ComponentRef:
        """The component with its own options, without core's keys."""
        return ComponentRef(use=self.use, **(self.model_extra or {}))


class ModelSection(Section):
    """What to serve. Other keys are options of the model component."""

    model_config = ConfigDict(extra="allow")

    name: str | None = None
    """A catalogue name, a hub id, a directory or a .gguf file; a bare ``model: NAME`` is the same."""
    path: str | None = None
    """A directory or a .gguf file, never a hub id. Relative to the working directory."""
    use: str | None = None
    """The model component; by default the one that is registered for the checkpoint's architecture."""
    fallback: str | None = "transformers"
    """The model component where none is registered for the architecture; null: such a checkpoint is refused."""
    revision: str | None = None
    """A branch, tag or commit of the hub repository; an error where the model is no hub id."""

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_source(self) -> "ModelSection":
        if (self.name is None) == (self.path is None):
            raise ValueError("should have either 'name' or 'path'.")
        return self

    @property
    def source(self) -> str:
        """What to load: ``path`` or ``name``."""
        return self.path or self.name or ""

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class SchedulerSection(ComponentSection):
    use: str = "chunked"
    max_batch_tokens: Count = 2048
    """Most tokens, drafts included, that a step computes."""
    max_running: Count = 256
    """Most requests that hold cache pages at a time."""


class KVCacheSection(ComponentSection):
    use: str = "prefix"
    block_size: Count | None = None
    """Tokens a page; by default chosen by the manager among the sizes that the attention backend takes."""
    memory: Bytes | None = None
    """Bytes for keys and values, with a unit; by default what the device has left."""
    num_blocks: Count | None = None
    """A fixed number of pages instead of ``memory``."""

    @model_validator(mode="after")
    def _one_size(self) -> "KVCacheSection":
        if self.memory is not None and self.num_blocks is not None:
            raise ValueError("'memory' and 'num_blocks' both give the size of the cache; keep one of them.")
        return self


class KVTransferSection(ComponentSection):
    use: str = "none"
    """Where pages go that the cache has no room for, or that another engine needs."""


class AttentionSection(ComponentSection):
    use: str = "auto"
    """``auto`` chooses among the installed backends by what they support, and says why."""


class QuantizationSection(ComponentSection):
    use: str = "none"
    """The form in which linear layers keep their weights."""


class SpeculatorSection(ComponentSection):
    use: str = "none"


class ExecutionSection(ComponentSection):
    use: str = "auto"
    """``auto`` chooses by what the ``parallel`` list needs, and says why."""
    depth: Count | None = None
    """Steps in flight: 2 plans the next step while the device computes this one. By default 1, and with pipeline stages
    as many as there are."""
    num_threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads of a worker's operators, at most 1024; by default torch's choice."""
    graphs: Annotated[Literal["auto", "full", "off"], BeforeValidator(_yaml_off)] = "auto"
    """Steps that are replayed, on a GPU of decoding and verification: auto where device, attention and model allow it,
    full: or refuse."""
    batch_sizes: Annotated[list[Count], Field(min_length=1)] | None = None
    """Rows for which steps are captured; by default 1, 2, 4, 8, 16, 24, 32, 48 … up to the most that can run. On a CPU
    the greatest is the most tokens of a step that is recorded, by default max_batch_tokens."""

    @model_validator(mode="after")
    def _sizes_of_graphs(self) -> "ExecutionSection":
        if self.batch_sizes is not None and self.graphs == "off":
            raise ValueError("'batch_sizes' says which graphs are captured, but 'graphs' is off; keep one of them.")
        if self.batch_sizes is not None and len(set(self.batch_sizes)) < len(self.batch_sizes):
            raise ValueError("'batch_sizes' names a size twice.")
        return self


class ServerSection(Section):
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """0: any free port; the chosen one is printed."""
    api_keys: Annotated[
        dict[str, str],
        WithJsonSchema({"anyOf": [
            {"type": "array", "items": {"type": "string"}},
            {"type": "object", "additionalProperties": {"type": "string"}},
        ]}),
    ] = Field(default_factory=dict)
    """Accepted bearer keys: a list, or a mapping from key to tenant. Empty: no key is needed."""
    admin_key: str | None = None
    """The bearer key of ``/admin/`` paths, which exchange parts while serving; without it there are none."""
    max_queue: Count = 1024
    """Most waiting requests; more are answered with 429 and Retry-After."""
    drain_timeout_s: Seconds = 30.0
    """After SIGTERM, how long running requests may go on."""
    watchdog_s: Seconds = 60.0
    """Without progress for so long, with work to do, the server is not ready any more."""
    served_model_name: str | None = None
    """The name clients use; by default the model's."""
    max_body_bytes: Bytes = 32 * 2**20
    """Larger request bodies are answered with 413."""
    cors_origins: list[str] = Field(default_factory=list)
    """Web origins that browsers may call from. Empty: none."""
    chat_template: str | None = None
    """A file with a Jinja chat template instead of the model's."""
    allow_request_chat_template: bool = False
    """Whether a request may bring its own chat template."""
    generation_config: bool = True
    """Whether sampling defaults come from the model's generation_config.json; else OpenAI's defaults hold."""
    strict_fields: bool = False
    """Refuse unknown request fields instead of naming them in a warning header."""

    @field_validator("api_keys", mode="before")
    @classmethod
    def _tenants(cls, value: Any) -> Any:
        """A list of keys gets one tenant a key, named by a digest: a tenant appears in logs, a key must not."""
        if not isinstance(value, list):
            if not isinstance(value, dict):
                raise ValueError("should be a list of keys ('[a, b]'), or a mapping from key to tenant ('{a: anna}').")
            return value
        if not all(isinstance(key, str) and key for key in value):
            raise ValueError("every key should be a text that is not empty; quote those that look like numbers.")
        return {key: f"key-{hashlib.sha256(key.encode()).hexdigest()[:8]}" for key in value}

    @field_validator("api_keys")
    @classmethod
    def _no_empty_key(cls, value: dict[str, str]) -> dict[str, str]:
        if "" in value:
            raise ValueError("an empty key would let everybody in.")
        return value

    @model_validator(mode="after")
    def _admin_key_of_its_own(self) -> "ServerSection":
        if self.admin_key == "":
            raise ValueError("an empty 'admin_key' would let everybody in.")
        if self.admin_key in self.api_keys:
            raise ValueError("'admin_key' is one of 'api_keys': every client could exchange parts.")
        return self

    @field_validator("cors_origins")
    @classmethod
    def _no_wildcard(cls, value: list[str]) -> list[str]:
        if "*" in value:
            raise ValueError("list the origins: '*' would let every website use this server.")
        return value


class Config(Section):
    """The whole config. ``model`` is the only key that must be given."""

    model: ModelSection
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and activations; auto: the checkpoint's own where the device computes well in it."""
    device: Annotated[str, WithJsonSchema({"type": "string", "pattern": _DEVICE.pattern})] = "auto"
    """cpu, cuda, cuda:1 …; auto: CUDA where there is a device, else the CPU."""
    seed: int = 0
    """Of the random numbers of requests that bring no seed."""
    max_model_len: Count | None = None
    """Most tokens of prompt and output; by default the model's own limit."""
    scheduler: SchedulerSection = SchedulerSection()
    kvcache: KVCacheSection = KVCacheSection()
    kv_transfer: KVTransferSection = KVTransferSection()
    attention: AttentionSection = AttentionSection()
    quantization: QuantizationSection = QuantizationSection()
    speculator: SpeculatorSection = SpeculatorSection()
    logits_processors: list[ComponentRef] = Field(
        default_factory=lambda: _refs("penalties", "bias", "bad_words", "min_tokens"))
    """Applied in this order."""
    parallel: list[ComponentRef] = Field(default_factory=list)
    """Strategies, outermost first. Empty: one process."""
    execution: ExecutionSection = ExecutionSection()
    observers: list[ComponentRef] = Field(default_factory=lambda: _refs("metrics"))
    server: ServerSection = ServerSection()

    @field_validator("device")
    @classmethod
    def _device_and_index(cls, value: str) -> str:
        if _DEVICE.fullmatch(value) is None:
            raise ValueError(
                f"should be 'auto', 'cpu', 'cuda', or a device and its number such as 'cuda:1', not {value!r}.")
        return value


SECTIONS: dict[str, str] = {
    "scheduler": "scheduler", "kvcache": "kvcache", "attention": "attention", "speculator": "speculator",
    "quantization": "quantization", "execution": "executor", "kv_transfer": "kv_transfer", "model": "model",
}
"""Config sections that name one component -> its kind."""

LISTS: dict[str, tuple[str, ...]] = {
    "logits_processors": ("logits_processor",), "parallel": ("shard", "deployment"), "observers": ("observer",),
}
"""Config lists of components -> the kinds that may stand in them."""


def _refs(*names: str) -> list[ComponentRef]:
    return [ComponentRef(use=name) for name in names]


FOREIGN = {
    "max_num_seqs": "scheduler.max_running",
    "max_num_batched_tokens": "scheduler.max_batch_tokens",
    "num_gpu_blocks_override": "kvcache.num_blocks",
    "gpu_memory_utilization": "kvcache.memory",
    "tensor_parallel_size": "parallel",
    "pipeline_parallel_size": "parallel",
    "data_parallel_size": "parallel",
    "attention_backend": "attention",
    "load_in_8bit": "quantization",
    "load_in_4bit": "quantization",
    "speculative_config": "speculator",
}
"""What people who come from another engine type -> the key that they want here."""


def known_keys() -> dict[str, str]:
    """What somebody may type -> the path of the key that is meant; for hints."""
    keys = dict(FOREIGN)
    for name, field in Config.model_fields.items():
        keys[name] = name
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            keys |= {inner: f"{name}.{inner}" for inner in field.annotation.model_fields if inner != "use"}
    return keys
