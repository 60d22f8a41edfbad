/* SPDX-License-Identifier: Apache-2.0 */
/* writer.pml - send, wait for space, drain, close */

/* What may be held still when the writer closes. */
#ifdef CLOSE_AT_ONCE
#define HELD_AT_CLOSE SLOTS
#else
#define HELD_AT_CLOSE 0
#endif

/* What the writer reads of one place. */
inline look_at(place)
{
	atomic {
		if
		:: (now_set & (1 << place)) && left[place] != seat_generation[place] ->
			number = cursor[place];
			assert(SINCE(number, seen[place]) <= SINCE(next, seen[place]));
			seen[place] = number;
			room = room && SINCE(next, number) <= may_be_held;
			number = 0
		:: else
		fi
	}
}

/* W1, V3: is there `room` with what `may_be_held` allows? The cursors are read one by one. */
inline look()
{
	if
	:: atomic {
		generation_changed && !lock ->
		generation_changed = false;
		now_set = in_set;
		now_dead = dead_set;
		room = true
	}
	:: atomic { !generation_changed -> room = true }
	fi;
	look_at(0)
#if PLACES > 1
	;
	look_at(1)
#endif
}

/* The program's answer to TND_E_PEER_DEAD. */
inline evict_the_dead()
{
#ifdef DEAD_ERROR
	if
	:: now_dead -> evict(0, 0); now_dead = 0 /* who dies is reader 0 */
	:: else
	fi
#else
	skip
#endif
}

/* V1 to V5. The word is sampled first: whoever then sees the flag bumps what was sampled. */
inline wait_for_space()
{
	assert(!room);
#if !defined(M_V21) && !defined(M_V13)
V1:	space_word_changed = false;
#endif
#ifdef M_V2
V2:	STORE(to_memory_w, WRITER_WAITING, 1);
#else
V2:	STORE_SEQ_CST(to_memory_w, WRITER_WAITING, 1);
#endif
#ifdef M_V21
V1:	space_word_changed = false;
#endif
V3:	look();
#ifdef M_V13
V1:	space_word_changed = false;
#endif
	if
	:: !room && !now_dead ->
V4:		if
		:: atomic { !space_word_changed -> writer_asleep = true }; !writer_asleep
		:: space_word_changed
		fi
	:: else
	fi;
V5:	STORE(to_memory_w, WRITER_WAITING, 0)
}

inline wait_until_room()
{
	do
	:: true ->
W1:		look();
		evict_the_dead();
		if
		:: room -> break
		:: else -> wait_for_space()
		fi
	od
}

/* W4 to W7; when closing, whether or not somebody sleeps. */
inline tell_readers()
{
	if
	:: sleepers || closing ->
W5:		atomic { empty_buffer(to_memory_w); sleepers = 0 };
W6:		d_step { bump_data_word() };
W7:		d_step { wake_readers() }
	:: else
	fi
}

inline write_slot()
{
	atomic {
		assert(!counted[0] || SINCE(next, held[0]) <= may_be_held);
#if READERS > 1
		assert(!counted[1] || SINCE(next, held[1]) <= may_be_held);
#endif
		slot[next % SLOTS] = next
	}
}

inline publish()
{
#ifdef M_W3
	STORE(to_memory_w, PUBLISHED, NEXT(next));
#else
	STORE_SEQ_CST(to_memory_w, PUBLISHED, NEXT(next));
#endif
	d_step { next = NEXT(next); sent++ }
}

proctype writer()
{
	byte address, value; /* of the store that leaves the buffer */
	byte next = START, sent;
	byte now_set, now_dead;
	byte seen[PLACES] = START;
	byte number, may_be_held;
	bool room, closing;

	now_set = in_set;
	{
		do
		:: !closing ->
			closing = (sent == OBJECTS);
			may_be_held = (closing -> HELD_AT_CLOSE : MAY_BE_HELD(next));
			wait_until_room();
			if
			:: closing ->
C1:				STORE(to_memory_w, CLOSED, 1)
			:: else ->
W2:				write_slot();
#ifndef M_W73
W3:				publish()
#endif
			fi;
W4:			tell_readers();
#ifdef M_W73
			if
			:: closing
			:: else ->
W3:				publish()
			fi
#endif
		:: else -> break
		od
	} UNLESS_DEAD(writer_died);
	writer_ended = true
}
