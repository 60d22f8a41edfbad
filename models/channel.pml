/* SPDX-License-Identifier: Apache-2.0 */
/*
 * channel.pml - the protocol of the channel: one writer, one or two readers, two slots
 *
 *   writer    W1 W2 W3 [W4 W5 W6 W7]      full:  V1 V2 V3 [V4] V5      C1
 *   reader    R1 R2 R3 [R4 R5 R6 R7]      empty: S1 S2 S3 [S4] S5      L1
 *   service   A1 .. A5, E1 .. E5, P1      of the writer's process, and its `lock`
 *   guest     P1 P2 P3                    service of a reader's process
 *   memory    store buffers               fate: who dies, is evicted, wakes for nothing
 *
 * Labels are those of docs/design/channel.md and of the code. Numbers of objects are modulo 8 and
 * begin at 6, so that they wrap. README.md lists the configurations (-D...) and the mutants
 * (-DM_...), each of which moves or weakens one step.
 *
 * Checked: the assertions (W1: a cursor is never nonsense; W2: nothing is overwritten that a counted
 * reader has not released; R2: the object wanted, whole; end: everything was seen) and invalid end
 * states: whoever still waits when nothing can happen any more has lost a wake. Nothing here times
 * out. The end of the run is reached by waiting until all is read (drain), then close.
 */
#ifndef READERS
#define READERS 1
#endif
#ifndef OBJECTS
#define OBJECTS 4
#endif
#define SLOTS 2
#define MODULO 8
#define START 6
#define NEXT(n) (((n) + 1) % MODULO)
#define SINCE(a, b) (((a) + MODULO - (b)) % MODULO)
#define NOTHING MODULO /* in a slot */

#ifdef REATTACH /* both readers, one after the other, in place 0 */
#define PLACES 1
#define PLACE(r) 0
#define OCCUPANT_GENERATION(r) ((r) + 1)
#else
#define PLACES READERS
#define PLACE(r) (r)
#define OCCUPANT_GENERATION(r) 1
#endif

/* Reader r is there from the start, comes late, or late to a place reserved for it. */
#ifdef JOIN
#define COMES_LATE(r) ((r) == READERS - 1)
#else
#define COMES_LATE(r) false
#endif
#ifdef RESERVED
#define RESERVED_FOR(r) ((r) == READERS - 1)
#else
#define RESERVED_FOR(r) false
#endif

/* Bytes: an object of two units fills the arena of two, one of one unit half of it. */
#ifdef BYTES
#define IS_BIG(n) ((n) % 4 == 3)
#else
#define IS_BIG(n) false
#endif
#define BEFORE(n) (((n) + MODULO - 1) % MODULO)
/* How many objects before n may still be held when n is written. */
#define MAY_BE_HELD(n) ((IS_BIG(n) || IS_BIG(BEFORE(n))) -> 0 : SLOTS - 1)

#if defined(READER_DIES) || defined(WRITER_DIES) || defined(EVICTS) || defined(NEEDLESS_WAKES)
#define HAS_FATE
#endif

#define FREE 0
#define LIVE 1
#define EVICTED 2

#include "memory.pml"

byte slot[SLOTS] = NOTHING;

/* The writer's process. */
bool lock;
byte in_set;     /* bits of places: whose cursors count */
byte dead_set;   /* of these, died */
bool writer_died, writer_ended;

/* The readers' processes. */
bool reader_died[READERS], reader_ended[READERS];
bool writer_is_dead[READERS]; /* P1 */
byte admitted[READERS];       /* 0: not asked, 1: asked, 2: A5 done */
bool evict_wanted;

/* Only the assertions look at these. */
byte held[READERS] = START; /* the oldest object that it has not done with */
bool counted[READERS];      /* nothing that it holds may be overwritten */

#if defined(READER_DIES) || defined(WRITER_DIES)
#define UNLESS_DEAD(dead) unless { dead }
#else
#define UNLESS_DEAD(dead)
#endif

#include "parts.pml"
#include "writer.pml"
#include "reader.pml"
#include "service.pml"

init
{
	byte r;

	atomic {
		do
		:: r < READERS ->
			if
			:: COMES_LATE(r) || RESERVED_FOR(r) -> skip
			:: else ->
				admitted[r] = 2;
				counted[r] = true;
				seat[PLACE(r)] = LIVE
			fi;
			if
			:: !COMES_LATE(r) -> in_set = in_set | (1 << PLACE(r))
			:: else
			fi;
			if
			:: RESERVED_FOR(r) -> counted[r] = true
			:: else
			fi;
			r++
		:: else -> break
		od;
		r = 0;
		run writer();
		run service();
		do
		:: r < READERS ->
			run reader(r);
#ifdef WRITER_DIES
			run guest(r);
#endif
			r++
		:: else -> break
		od;
		r = 0;
#ifdef HAS_FATE
		run fate()
#endif
	}
}
