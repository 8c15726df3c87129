// Products of 33 to 64 rows with a matrix of 16 bits, y = x w^T, by Hopper's own products. A block makes so many outputs
// that each multiprocessor has one block, so x is read as seldom as can be. A sum goes through the depth in order.

// Where 16-byte piece `piece` of a row of a chunk lies, as kv_matrix says.
KV_FN int kv_piece_of(int row, int piece) { return row * KV_CHUNK + (piece ^ row % 8) * 8; }
