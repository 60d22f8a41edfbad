/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory.pml - shared memory as processors give it: what a store buffer holds back, and futexes
 *
 *   writer ---> to_memory_w    [..] ---+                   each buffer is first in, first out, and
 *   reader r -> to_memory_r[r] [..] ---+--> memory         gives its oldest store at any moment
 *
 * STORE_SEQ_CST and every read-modify-write empty the storing process's own buffer first, in one
 * step with what they do; STORE goes through the buffer. A load sees memory: no process loads what
 * it stored itself. Stores of a process that died still arrive.
 */

/* Addresses. Places and readers are small numbers that are added. */
#define PUBLISHED 0
#define WRITER_WAITING 1
#define CLOSED 2
#define SLEEPERS 3 /* the value is a bit to be set */
#define CURSOR 4
#define LEFT 6

byte published = START;
bool writer_waiting; /* not 0 */
byte sleepers;
bool closed;
byte cursor[PLACES] = START;
byte left[PLACES]; /* generation of the occupant that left, from 1 on */

/* Written by seq_cst stores, read-modify-writes, or under `lock` only: they need no buffer. */
byte seat[PLACES];
byte seat_generation[PLACES] = 1;

chan to_memory_w = [2] of { byte, byte };
chan to_memory_r[READERS] = [2] of { byte, byte };

/*
 * Counters are compared for equality only: each is kept as whether it has changed since the one who
 * compares took its sample. That is exact, and their values make no states of their own.
 */
bool space_word_changed;                                  /* since V1 */
bool data_word_changed[READERS];                          /* since S1 */
bool local_word_changed[READERS];                         /* since S1 */
bool same_episode[READERS];                               /* of writer_waiting, since R4 */
bool generation_changed;                                  /* since the writer copied the set */

inline bump_data_word()
{
	data_word_changed[0] = true
#if READERS > 1
	;
	data_word_changed[1] = true
#endif
}

inline forget_episode()
{
	same_episode[0] = false;
#if READERS > 1
	same_episode[1] = false;
#endif
}

inline arrive(address, value)
{
	if
	:: address == PUBLISHED -> published = value
	:: address == WRITER_WAITING ->
		writer_waiting = value;
		if
		:: value -> forget_episode()
		:: else
		fi
	:: address == CLOSED -> closed = true
	:: address == SLEEPERS -> sleepers = sleepers | value
	:: address >= CURSOR && address < LEFT -> cursor[address - CURSOR] = value
	:: address >= LEFT -> left[address - LEFT] = value
	fi;
	address = 0;
	value = 0
}

/* What a seq_cst store or a read-modify-write begins with; inside atomic. */
inline empty_buffer(buffer)
{
	do
	:: buffer?address, value -> arrive(address, value)
	:: empty(buffer) -> break
	od
}

#define STORE(buffer, a, v) buffer!a, v
#define STORE_SEQ_CST(buffer, a, v) atomic { empty_buffer(buffer); buffer!a, v; empty_buffer(buffer) }

active proctype memory()
{
	byte address, value;

end:	do
	:: atomic { to_memory_w?address, value -> arrive(address, value) }
	:: atomic { to_memory_r[0]?address, value -> arrive(address, value) }
#if READERS > 1
	:: atomic { to_memory_r[1]?address, value -> arrive(address, value) }
#endif
	od
}

/* -- futexes: comparing and falling asleep is one step -- */

bool writer_asleep;
bool reader_asleep[READERS];

inline wake_readers()
{
	reader_asleep[0] = false
#if READERS > 1
	;
	reader_asleep[1] = false
#endif
}
