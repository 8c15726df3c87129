// Of each position, the cosines of all pairs of dimensions and then the sines.
const int at = (kv_block_x * WARPS + kv_warp) * 32 + kv_lane, half = frequencies_shape[0], position = at / half;
if (position >= POSITIONS) return;
const KvTurn turn = kv_turn(float(position) * frequencies[at % half]);
turns[at + position * half] = turn.cosine;
turns[at + position * half + half] = turn.sine;
