"""How every kernel is compiled: no GIL, C division, cached on disk under a key of all sources (see `cpu.source_key`)."""

from __future__ import annotations

from hotneuron.kernels import cpu  # noqa: F401  (sets Numba up before its import)

from numba import njit as _njit  # isort: skip

njit = _njit(nogil=True, cache=True, error_model="numpy")
