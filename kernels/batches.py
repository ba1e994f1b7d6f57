"""How many rows and neurons the step program takes together."""

UNIT = 32  # neurons of two tiles
SPARSE_BATCH = 32  # rows whose active neurons are listed together
SUB_BATCH = 64  # rows that pass through gate and up together, so that their products stay in the first cache
TILE_SIZES = 3  # of a batch that tile kernels exist for: 1, 4 and 8 rows
