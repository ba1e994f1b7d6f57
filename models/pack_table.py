"""What a pack will hold, known from a model's headers: the matrices and their bytes, before anything is read."""

from __future__ import annotations

from gguf.constants import GGMLQuantizationType as T

from hotneuron.kernels import formats
from hotneuron.kernels.down_layout import format_of
from hotneuron.models.gguf_file import GGUFFile
from hotneuron.models.model_config import ModelConfig
from hotneuron.models.pack import Matrix, head_width
from hotneuron.models.pack_sources import Kind, Source, sources_of
from hotneuron.models.tensor_table import VECTOR_TYPES


def matrix_of(file: GGUFFile, source: Source, config: ModelConfig) -> Matrix:
    """The entry that a source becomes, at offset 0."""
    info, role = file.tensors[source.name], source.role.rpartition(".")[2]
    type_, (columns, rows) = T(info.type), info.shape[:2]
    if source.layout.startswith("down"):
        return Matrix(0, format_of(type_), formats.padded(config.ffn, 64), config.hidden, source.layout)
    if source.is_transposed:
        # The blocks of its type run along the neurons' rows, so turned round it can only be kept in floats.
        type_, columns, rows = type_ if type_ in VECTOR_TYPES else T.F16, rows, columns
    match role:
        case "attn_q":
            rows = config.n_heads * head_width(config)
        case "attn_k" | "attn_v":
            rows = config.n_kv_heads * head_width(config)
        case "attn_output" if head_width(config) != config.head_dim:
            # Padded heads make new columns, which blocks of 32 cannot follow: keep this one in floats.
            type_, columns = T.F32, config.n_heads * head_width(config)
        case "ffn_gate" | "ffn_up" | "ffn_signs" | "fc2":
            rows = formats.padded(config.ffn, 64)
    return Matrix(0, formats.FORMAT_OF[type_], rows, columns, source.layout)


def matrices_of(file: GGUFFile, config: ModelConfig, kind: Kind) -> dict[str, Matrix]:
    """Role to entry, as `Pack.matrices` will be but for the offsets."""
    sources = (source for source in sources_of(config, kind) if not source.is_vector)
    return {source.role: matrix_of(file, source, config) for source in sources}
