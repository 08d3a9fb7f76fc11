// Words of a few rows into columns, as packed weights have them.
#pragma once

#include <cstdint>
#include <cstring>

namespace tpengine::cpu {

// Four words, by the compiler's own vector type: any processor.
typedef uint32_t FourWords __attribute__((vector_size(16)));

// static: each instruction set has its own copy.
static inline FourWords load_words(const void* p) {
  FourWords words;
  memcpy(&words, p, sizeof words);
  return words;
}

// Word i of row r goes to place i * stride + r of the words at `to`.
static inline void store_transposed(void* to, int64_t stride, const FourWords (&rows)[4]) {
  const FourWords &a = rows[0], &b = rows[1], &c = rows[2], &d = rows[3];
  const FourWords ab[] = {{a[0], b[0], a[1], b[1]}, {a[2], b[2], a[3], b[3]}};
  const FourWords cd[] = {{c[0], d[0], c[1], d[1]}, {c[2], d[2], c[3], d[3]}};
  for (int i = 0; i < 4; i += 2) {
    const FourWords &x = ab[i / 2], &y = cd[i / 2];
    const FourWords columns[] = {{x[0], x[1], y[0], y[1]}, {x[2], x[3], y[2], y[3]}};
    for (int j = 0; j < 2; ++j)
      memcpy(static_cast<uint32_t*>(to) + (i + j) * stride, &columns[j], sizeof columns[j]);
  }
}

}  // namespace tpengine::cpu
