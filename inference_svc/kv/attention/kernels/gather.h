// Stored rows become values again: a lane takes eight of one row, and reads and writes them at once.
template <typename T, int COUNT>
struct alignas(COUNT * sizeof(T)) KvTogether {
  T item[COUNT];
};

template <typename Rows, bool IS_BFLOAT, typename T>
KV_FN void kv_eight_values(KV_GLOBAL const kv_u16* page, int line, int eight, KV_GLOBAL T* out) {
  using Units = KvTogether<kv_u16, Rows::BITS / 2>;
  const Units units = *(KV_GLOBAL const Units*)(page + Rows::BASE + line * Rows::ROW_UNITS + eight * (Rows::BITS / 2));
  float scale = 1, bias = 0;
  if (Rows::IS_QUANTIZED) {
    const int group = line * Rows::GROUPS + eight * 8 / Rows::GROUP;
    scale = kv_scale<IS_BFLOAT>(page[Rows::SCALES + group]);
    bias = kv_scale<IS_BFLOAT>(page[Rows::BIASES + group]);
  }
  float values[8];
  KV_UNROLL for (int i = 0; i < 8; ++i) {
    if (Rows::BITS == 16) values[i] = kv_scale<IS_BFLOAT>(units.item[i]);
    if (Rows::BITS == 8) values[i] = scale * float((units.item[i / 2] >> (i % 2 * 8)) & 0xff) + bias;
    if (Rows::BITS == 4) values[i] = scale * float((units.item[i / 4] >> (i % 4 * 4)) & 0xf) + bias;
  }
  constexpr int AT_ONCE = 16 / sizeof(T);
  KV_UNROLL for (int first = 0; first < 8; first += AT_ONCE) {
    KvTogether<T, AT_ONCE> made;
    KV_UNROLL for (int i = 0; i < AT_ONCE; ++i) made.item[i] = T(values[first + i]);
    *(KV_GLOBAL KvTogether<T, AT_ONCE>*)(out + first) = made;
  }
}
