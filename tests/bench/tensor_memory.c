/* Counts the bytes of live tensors, exactly: it stands in for the function that PyTorch's allocator
 * of CPU memory calls (posix_memalign with its own alignment), and for free(), in all threads.
 *
 * Each block gets a header of one alignment in front, whose last 16 bytes are a mark and the size.
 * Of a block from elsewhere these 16 bytes are malloc's own header, so that they can be read.
 */
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define ALIGNMENT 64 /* c10::gAlignment */
#define MARK 0x6d696e6966736470ull

extern void *__libc_memalign(size_t alignment, size_t size);
extern void __libc_free(void *block);

static atomic_llong live, peak;

int posix_memalign(void **out, size_t alignment, size_t size) {
  size_t header = alignment == ALIGNMENT ? ALIGNMENT : 0;
  char *block = __libc_memalign(alignment, size + header);
  if (block == NULL) return 12; /* ENOMEM */
  *out = block + header;
  if (header) {
    uint64_t *words = *out;
    words[-2] = MARK;
    words[-1] = size;
    long long now = atomic_fetch_add(&live, size) + size, most = atomic_load(&peak);
    while (now > most && !atomic_compare_exchange_weak(&peak, &most, now)) {
    }
  }
  return 0;
}

void free(void *block) {
  uint64_t *words = block;
  if (block != NULL && words[-2] == MARK) {
    words[-2] = 0;
    atomic_fetch_sub(&live, words[-1]);
    block = (char *)block - ALIGNMENT;
  }
  __libc_free(block);
}

long long tensors_now(void) { return atomic_load(&live); }
long long tensors_peak(void) { return atomic_load(&peak); }
void forget_peak(void) { atomic_store(&peak, atomic_load(&live)); }
