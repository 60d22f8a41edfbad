/* SPDX-License-Identifier: Apache-2.0 */
/* spin.c - how long a wait spins before it sleeps, and one pause of it */
#include <sched.h>
#include <stddef.h>

#include "base.h"
#include "futex.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

/* Going to sleep and being woken costs 10 to 50 us: to spin longer cannot pay. */
#define LIMIT_NS INT64_C(50000)
/* About the cost of a wake: what a spin of this length may save. Also the margin on the average. */
#define LEAST_NS INT64_C(15000)
/* Weight of the newest wait in the average: 1 / 4. */
#define LEARN_SHIFT 2
/* A long pause counts as this many limits, so that some ten short waits forget it. */
#define LONG_LIMITS 8

static bool one_processor(void)
{
	cpu_set_t set;

	/* It fails where the kernel knows more than 1,024 processors: not one. */
	return sched_getaffinity(0, sizeof(set), &set) == 0 && CPU_COUNT(&set) < 2;
}

void tnd__spin_init(struct tnd__spin *spin, uint64_t limit_ns)
{
	spin->period_ns = 0;
	spin->streams = false;
	spin->waits = 0;
	spin->fixed = limit_ns != 0;
	if (limit_ns == UINT64_MAX || one_processor())
		spin->limit_ns = 0;
	else
		spin->limit_ns = limit_ns ? (int64_t)TND__MIN(limit_ns, INT64_MAX / 16) : LIMIT_NS;
}

int64_t tnd__spin_budget(const struct tnd__spin *spin)
{
	int64_t want_ns = LEAST_NS;

	if (spin->fixed)
		return spin->limit_ns;
	if (spin->period_ns <= spin->limit_ns)
		want_ns += 2 * spin->period_ns;
	return TND__MIN(spin->limit_ns, want_ns);
}

void tnd__spin_learn(struct tnd__spin *spin, int64_t waited_ns)
{
	int64_t most_ns = LONG_LIMITS * spin->limit_ns;
	int64_t counted_ns = TND__MAX(TND__MIN(waited_ns, most_ns), 0);

	spin->period_ns += (counted_ns - spin->period_ns) / (1 << LEARN_SHIFT);
}

#if defined(__x86_64__)
/* About 10 us: what a caller may be late to look at its clock and at other words. */
#define UMWAIT_TICKS 20000
#define UMWAIT_LIGHT 1 /* C0.1: wakes faster than C0.2 */

static bool have_waitpkg(void)
{
	static _Atomic int known; /* 0: not asked, 1: no, 2: yes */
	unsigned int eax, ebx, ecx = 0, edx;
	int answer = atomic_load_explicit(&known, memory_order_relaxed);

	if (!answer) {
		answer = 1;
		if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ecx & 1u << 5))
			answer = 2;
		/* relaxed: every thread finds the same. */
		atomic_store_explicit(&known, answer, memory_order_relaxed);
	}
	return answer == 2;
}

__attribute__((target("waitpkg"))) static void monitor_wait(const _Atomic uint64_t *word,
							    uint64_t expected)
{
	_umonitor((void *)(uintptr_t)word);
	/* relaxed: only whether to pause; the caller looks again with the order that it needs. */
	if (atomic_load_explicit(word, memory_order_relaxed) == expected)
		_umwait(UMWAIT_LIGHT, __builtin_ia32_rdtsc() + UMWAIT_TICKS);
}
#endif

void tnd__spin_pause(const _Atomic uint64_t *word, uint64_t expected)
{
#if defined(__x86_64__)
	if (word && have_waitpkg())
		monitor_wait(word, expected);
	else
		_mm_pause();
#elif defined(__aarch64__)
	(void)word;
	(void)expected;
	/* yield does nothing on most cores; isb takes about as long as pause on x86. */
	__asm__ volatile("isb" ::: "memory");
#else
	(void)word;
	(void)expected;
	__asm__ volatile("" ::: "memory");
#endif
}
