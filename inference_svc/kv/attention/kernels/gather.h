// Stored rows become values again: a lane takes eight of one row.
template <typename Rows, bool IS_BFLOAT, typename T>
KV_FN void kv_eight_values(KV_GLOBAL const kv_u16* page, int line, int eight, KV_GLOBAL T* out) {
  constexpr int UNITS = Rows::BITS / 2;  // of eight values
  KV_GLOBAL const kv_u16* units = page + Rows::BASE + line * Rows::ROW_UNITS + eight * UNITS;
  float scale = 1, bias = 0;
  if (Rows::IS_QUANTIZED) {
    const int group = line * Rows::GROUPS + eight * 8 / Rows::GROUP;
    scale = kv_scale<IS_BFLOAT>(page[Rows::SCALES + group]);
    bias = kv_scale<IS_BFLOAT>(page[Rows::BIASES + group]);
  }
  KV_UNROLL for (int i = 0; i < 8; ++i) {
    if (Rows::BITS == 16) out[i] = T(kv_scale<IS_BFLOAT>(units[i]));
    if (Rows::BITS == 8) out[i] = T(scale * float((units[i / 2] >> (i % 2 * 8)) & 0xff) + bias);
    if (Rows::BITS == 4) out[i] = T(scale * float((units[i / 4] >> (i % 4 * 4)) & 0xf) + bias);
  }
}
