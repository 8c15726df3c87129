// What a page of a format looks like, which tokens a query sees, and how a warp sums: shared by all kernels.
KV_CONST int KV_PAGE_TOKENS = 256;
KV_CONST float KV_NONE = -1e30f;  // the score of what is not seen: finite, so that differences stay numbers
KV_CONST float KV_LOG2E = 1.4426950408889634f;  // scores are in units of the exponent of 2

// The rows of K or V in a page, from 16-bit unit BASE on.
template <int HEADS_, int DIM_, int BITS_, int GROUP_, int BASE_>
struct KvRows {
  KV_CONST int HEADS = HEADS_, DIM = DIM_, BITS = BITS_, BASE = BASE_;
  KV_CONST bool IS_QUANTIZED = BITS_ != 16;
  KV_CONST int GROUP = IS_QUANTIZED ? GROUP_ : DIM_;
  KV_CONST int GROUPS = DIM_ / (BITS_ != 16 ? GROUP_ : DIM_);
  KV_CONST int ROW_UNITS = DIM_ * BITS_ / 16;
  KV_CONST int ROW_CHUNKS = ROW_UNITS / 8;          // of 16 bytes
  KV_CONST int GROUP_CHUNKS = ROW_CHUNKS / GROUPS;
  KV_CONST int CHUNK_DIMS = 128 / BITS_;
  KV_CONST int SCALES = BASE_ + HEADS_ * KV_PAGE_TOKENS * ROW_UNITS;
  KV_CONST int BIASES = SCALES + (IS_QUANTIZED ? HEADS_ * KV_PAGE_TOKENS * GROUPS : 0);
  KV_CONST int END = BIASES + (IS_QUANTIZED ? HEADS_ * KV_PAGE_TOKENS * GROUPS : 0);
};

// Positions that some query of a row sees: [low, high]; nothing if high < low.
struct KvSeen {
  int low, high;
};

KV_FN KvSeen kv_seen(int length, int query_count, int query, int window) {
  KvSeen seen;
  seen.high = length - query_count + query;
  seen.low = window > 0 && seen.high >= window ? seen.high - window + 1 : 0;
  return seen;
}

// What any query of a row sees, from the first query's first to the last one's last.
KV_FN KvSeen kv_seen_by_any(int length, int query_count, int window) {
  KvSeen seen = kv_seen(length, query_count, 0, window);
  seen.high = length - 1;
  return seen;
}

template <bool IS_BFLOAT>
KV_FN float kv_scale(kv_u16 bits) {
  return IS_BFLOAT ? kv_from_bits(kv_u32(bits) << 16) : kv_from_half(bits);
}

KV_FN float kv_warp_max(float x) {
  KV_UNROLL for (int mask = 16; mask; mask >>= 1) {
    float other = kv_shuffle_xor(x, mask);
    x = x > other ? x : other;
  }
  return x;
}

KV_FN float kv_warp_sum(float x) {
  KV_UNROLL for (int mask = 16; mask; mask >>= 1) x += kv_shuffle_xor(x, mask);
  return x;
}
