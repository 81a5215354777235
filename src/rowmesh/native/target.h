/* What the kernels' files share. */
#ifndef ROWMESH_TARGET_H
#define ROWMESH_TARGET_H

/* Clones are chosen when the library is loaded, by a means (ifunc) that only glibc has. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif
#define INLINE static inline __attribute__((always_inline))
#define REFUSED (-1)

#endif
