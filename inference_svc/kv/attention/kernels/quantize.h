// New rows become the units that a page holds: a warp quantizes one group of one row, as mx.quantize does.

// As a value of type T, rounded to the nearest.
template <typename T>
KV_FN float kv_rounded(float x) {
  return float(T(x));
}

template <bool IS_BFLOAT>
KV_FN kv_u16 kv_scale_bits(float x) {
  return IS_BFLOAT ? kv_to_bfloat(x) : kv_to_half(x);
}

// Group `group` of the row `values`. `codes`, `scales` and `biases` are the row's.
template <typename T, typename Rows, bool IS_BFLOAT>
KV_FN void kv_quantize_group(KV_GLOBAL const T* values, int group, KV_GLOBAL kv_u16* codes, KV_GLOBAL kv_u16* scales,
                             KV_GLOBAL kv_u16* biases, int lane) {
  if (!Rows::IS_QUANTIZED) {
    for (int i = lane; i < Rows::DIM; i += 32) codes[i] = kv_scale_bits<IS_BFLOAT>(float(values[i]));
    return;
  }
  constexpr float BINS = float((1 << (Rows::BITS % 16)) - 1);
  values += group * Rows::GROUP;
  float low = 3.402823466e38f, high = KV_MAX_STARTS_AT;
  for (int i = lane; i < Rows::GROUP; i += 32) {
    float value = float(values[i]);
    low = value < low ? value : low;
    high = value > high ? value : high;
  }
  low = -kv_warp_max(-low);
  high = kv_warp_max(high);
  float scale = (high - low) / BINS;
  scale = scale > 1e-7f ? scale : 1e-7f;
  const bool is_low_larger = (low < 0 ? -low : low) > (high < 0 ? -high : high);
  scale = is_low_larger ? scale : -scale;
  const float edge = is_low_larger ? low : high, first = kv_round(edge / scale);
  scale = first == 0 ? scale : edge / first;
  const float bias = first == 0 ? 0.0f : edge;
  if (lane == 0) {
    scales[group] = kv_scale_bits<IS_BFLOAT>(kv_rounded<T>(scale));
    biases[group] = kv_scale_bits<IS_BFLOAT>(kv_rounded<T>(bias));
  }
  constexpr int EACH = 16 / Rows::BITS, UNITS = Rows::GROUP / (EACH ? EACH : 1);
  for (int unit = lane; unit < UNITS; unit += 32) {
    kv_u32 packed = 0;
    for (int i = 0; i < EACH; ++i) {
      float code = kv_round((float(values[unit * EACH + i]) - bias) / scale);
      code = code < 0 ? 0.0f : code > BINS ? BINS : code;
      packed |= kv_u32(code) << (i * Rows::BITS);
    }
    codes[group * UNITS + unit] = kv_u16(packed);
  }
}
