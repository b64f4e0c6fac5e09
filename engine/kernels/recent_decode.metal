// The keys and values of the last positions, with those of a step's new rows put in place, for all layers in one launch
// (recent.py). MLX can write into an array only where nothing in flight holds it, so that of a cache which attention has
// just read it makes a copy; a small array made anew costs a launch and no copy of the cache.
//
// recent [1, layers · 2 · kv heads, room, 256] of T: for each layer its key heads, then its value heads. k0 … k9
// [kv heads, rows, 256] and v0 … v9 [rows, kv heads, 256] of T are the new rows of up to ten layers; the rest are not read.

// kernel: update
// inputs: recent first position k0 k1 k2 k3 k4 k5 k6 k7 k8 k9 v0 v1 v2 v3 v4 v5 v6 v7 v8 v9
// dense: recent first position k0 k1 k2 k3 k4 k5 k6 k7 k8 k9 v0 v1 v2 v3 v4 v5 v6 v7 v8 v9
// outputs: updated
// template: typename T, int LAYERS, int ROWS, int SIMDGROUPS
//
// first, position int32 [at least 1]: positions of the first row of `recent` and of the first new row. updated as recent.
// Grid: (room / SIMDGROUPS) × (layers · 2 · kv heads) threadgroups of SIMDGROUPS simdgroups, one a row.
const uint lane = thread_index_in_simdgroup;
const uint row = threadgroup_position_in_grid.x * uint(SIMDGROUPS) + simdgroup_index_in_threadgroup;
const uint plane = threadgroup_position_in_grid.y;
const uint room = uint(recent_shape[2]);
const uint kv_heads = uint(recent_shape[1]) / uint(2 * LAYERS);
const uint head = plane % kv_heads;
const uint layer = plane / (2u * kv_heads);
const bool value = plane / kv_heads % 2u != 0u;

const device T* from = recent + (plane * room + row) * 256u;
// A row before the first new one wraps around, past all of them.
const uint fresh = row - uint(position[0] - first[0]);
if (fresh < uint(ROWS)) {
  const device T* k = k0;
  const device T* v = v0;
  if (LAYERS > 1 && layer == 1u) { k = k1; v = v1; }
  if (LAYERS > 2 && layer == 2u) { k = k2; v = v2; }
  if (LAYERS > 3 && layer == 3u) { k = k3; v = v3; }
  if (LAYERS > 4 && layer == 4u) { k = k4; v = v4; }
  if (LAYERS > 5 && layer == 5u) { k = k5; v = v5; }
  if (LAYERS > 6 && layer == 6u) { k = k6; v = v6; }
  if (LAYERS > 7 && layer == 7u) { k = k7; v = v7; }
  if (LAYERS > 8 && layer == 8u) { k = k8; v = v8; }
  if (LAYERS > 9 && layer == 9u) { k = k9; v = v9; }
  from = value ? v + (fresh * kv_heads + head) * 256u : k + (head * uint(ROWS) + fresh) * 256u;
}
// Words of 16 bytes.
constexpr uint WORDS = uint(sizeof(T)) * 16u;
const device uint4* words = (const device uint4*)from;
device uint4* to = (device uint4*)(updated + (plane * room + row) * 256u);
for (uint word = lane; word < WORDS; word += 32u) to[word] = words[word];
