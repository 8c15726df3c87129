// Drawn tokens, two rows to a result, with a bit more where the row's greatest logit is no number.
const int row = kv_lane;
if (row < tokens_shape[0]) {
  const bool is_number = fabsf(float(greatest[row])) <= 3.402823466e38f;
  results[row / 2][row % 2] = tokens[row] | (is_number ? 0u : 1u << 31);
}
