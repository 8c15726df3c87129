// New tokens' queries and keys, rotated where they are used: each pair of dimensions, DIM / 2 apart, by its position.

// Queries of one token, one behind the other. `turns`: of its position, all cosines and then all sines; without these they
// are rotated already.
template <typename T>
struct KvTurned {
  const T* queries;
  const float* turns;
};
template <typename T>
KV_FN KvTurned<T> operator+(KvTurned<T> given, int at) { return KvTurned<T>{given.queries + at, given.turns}; }

// A key or a query that is rotated once, whose angles nobody else needs.
template <typename T>
struct KvTurnedOnce {
  const T* queries;
  const float* frequencies;
  float position;
};

template <int DIM, typename T>
KV_FN void kv_rotate(const T* given, int dim, KvTurn turn, float* left, float* right) {
  const float a = float(given[dim]), b = float(given[dim + DIM / 2]);
  *left = kv_rounded<T>(a * turn.cosine - b * turn.sine);
  *right = kv_rounded<T>(a * turn.sine + b * turn.cosine);
}

// A lane's values of a row, in T as a rotation of its own would write them.
template <int DIM, typename T>
KV_FN void kv_query_values(const KvTurned<T>& given, float* values, int lane) {
  constexpr int HALF = DIM / 64;
  if (!given.turns) {
    KV_UNROLL for (int i = 0; i < 2 * HALF; ++i) values[i] = float(given.queries[i * 32 + lane]);
    return;
  }
  KV_UNROLL for (int i = 0; i < HALF; ++i) {
    const int dim = i * 32 + lane;
    kv_rotate<DIM>(given.queries, dim, KvTurn{given.turns[dim], given.turns[dim + DIM / 2]}, values + i, values + i + HALF);
  }
}
template <int DIM, typename T>
KV_FN void kv_query_values(const KvTurnedOnce<T>& given, float* values, int lane) {
  constexpr int HALF = DIM / 64;
  KV_UNROLL for (int i = 0; i < HALF; ++i) {
    const int dim = i * 32 + lane;
    kv_rotate<DIM>(given.queries, dim, kv_turn(given.position * given.frequencies[dim]), values + i, values + i + HALF);
  }
}

// A group of a new row of one head, those of its keys, rotated in `room`, then those of its values, into their page.
template <typename T, typename K, typename V, bool IS_BFLOAT, typename Key>
KV_FN void kv_append_group(int group, Key key, const T* value, kv_u16* page, int line, T* room, int lane) {
  if (group < K::GROUPS) {
    float values[K::DIM / 32];
    kv_query_values<K::DIM>(key, values, lane);
    KV_UNROLL for (int i = 0; i < K::DIM / 32; ++i) room[i * 32 + lane] = T(values[i]);
    kv_warp_barrier();
    kv_quantize_group<T, K, IS_BFLOAT>(room, group, page + K::BASE + line * K::ROW_UNITS, page + K::SCALES + line * K::GROUPS,
                                       page + K::BIASES + line * K::GROUPS, lane);
    kv_warp_barrier();
  } else {
    kv_quantize_group<T, V, IS_BFLOAT>(value, group - K::GROUPS, page + V::BASE + line * V::ROW_UNITS,
                                       page + V::SCALES + line * V::GROUPS, page + V::BIASES + line * V::GROUPS, lane);
  }
}
