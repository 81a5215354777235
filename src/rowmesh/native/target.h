/* What the kernels' files share. */
#ifndef ROWMESH_TARGET_H
#define ROWMESH_TARGET_H

/* Clones are chosen when the library is loaded, by a means (ifunc) that only glibc has. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif
/* Fused multiply-add, one rounding: bits are those of every CPU that has it. Who calls a FUSED
 * function asks has_fused() first. */
#if defined(__x86_64__)
#define FUSED __attribute__((target("avx2,fma")))
static inline int has_fused(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#elif defined(__FP_FAST_FMAF)
#define FUSED
static inline int has_fused(void) { return 1; }
#else
#define FUSED
static inline int has_fused(void) { return 0; }
#endif
#define INLINE static inline __attribute__((always_inline))
#define REFUSED (-1)

#endif
