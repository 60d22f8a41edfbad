/* SPDX-License-Identifier: Apache-2.0 */
/* reader.pml - attach, receive, wait for data, leave */

#define IS_MINE(r) (seat[PLACE(r)] == LIVE && seat_generation[PLACE(r)] == OCCUPANT_GENERATION(r))
#define MY_BIT(r) (1 << PLACE(r))

#ifdef EVICTS
#define MAY_BE_EVICTED(r) ((r) == 0)
#else
#define MAY_BE_EVICTED(r) false
#endif

#define HOW_UNKNOWN 0
#define HOW_CLOSED 1
#define HOW_WRITER_DEAD 2
#define HOW_EVICTED 3
#define HOW_LEFT 4
#define HOW_REFUSED 5

inline attach()
{
	admitted[me] = 1;
	if
	:: atomic { admitted[me] == 2 -> next = held[me] }
	:: atomic { writer_died || writer_ended -> how = HOW_REFUSED; goto over }
	fi
}

/* R2: in the end of a borrow the slot must be what it was in the beginning. */
inline read_slot()
{
#ifdef M_R32
	STORE_SEQ_CST(to_memory_r[me], CURSOR + PLACE(me), NEXT(next));
#endif
	atomic {
		if
		:: !IS_MINE(me) -> how = HOW_EVICTED
		:: else ->
			assert(slot[next % SLOTS] == next);
			next = NEXT(next);
			held[me] = next
		fi
	}
}

inline give_back()
{
#ifdef M_R3
	STORE(to_memory_r[me], CURSOR + PLACE(me), next);
#elif defined(M_R32)
	skip;
#else
	STORE_SEQ_CST(to_memory_r[me], CURSOR + PLACE(me), next);
#endif
}

inline receive()
{
	read_slot();
	if
	:: how -> goto over
	:: else
	fi;
#ifdef M_R63
R4:	tell_writer();
R3:	give_back()
#else
R3:	give_back();
R4:	tell_writer()
#endif
}

inline sample_words()
{
	atomic { data_word_changed[me] = false; local_word_changed[me] = false }
}

#ifdef M_S3
#define IS_SOMETHING something
#else
#define IS_SOMETHING (published != next)
#endif

/* S3. Whatever ends a wait is looked at before `published`: what was sent before it is then seen. */
inline look_for_end()
{
#ifdef M_S3
	something = (published != next);
#endif
	atomic {
		if
		:: !IS_MINE(me) -> how = HOW_EVICTED
		:: else ->
			if
			:: closed -> how = HOW_CLOSED
			:: !closed && writer_is_dead[me] -> how = HOW_WRITER_DEAD
			:: else
			fi
		fi
	};
}

inline wait_for_data()
{
	assert(!how);
#if !defined(M_S21) && !defined(M_S13)
S1:	sample_words();
#endif
#ifdef M_S2
S2:	STORE(to_memory_r[me], SLEEPERS, MY_BIT(me));
#else
S2:	STORE_SEQ_CST(to_memory_r[me], SLEEPERS, MY_BIT(me));
#endif
#ifdef M_S21
S1:	sample_words();
#endif
S3:	look_for_end();
#ifdef M_S13
S1:	sample_words();
#endif
	if
	:: atomic { how != HOW_EVICTED && IS_SOMETHING -> how = HOW_UNKNOWN }
	:: how == HOW_EVICTED || (how && !IS_SOMETHING)
	:: !how && !IS_SOMETHING ->
S4:		if
		:: atomic {
			!data_word_changed[me] && !local_word_changed[me] ->
			reader_asleep[me] = true
		}; !reader_asleep[me]
		:: data_word_changed[me] || local_word_changed[me]
		fi
	fi;
S5:	atomic {
		empty_buffer(to_memory_r[me]);
		sleepers = sleepers & ~MY_BIT(me)
	}
}

/* Whatever ended the calls, nothing that was sent for it is missing. */
inline check_end()
{
	if
	:: how == HOW_CLOSED || how == HOW_WRITER_DEAD ->
		assert(next == published)
	:: how == HOW_EVICTED -> assert(MAY_BE_EVICTED(me))
	:: else
	fi
}

proctype reader(byte me)
{
	byte address, value; /* of the store that leaves the buffer */
	byte next = START, how;
#ifdef M_S3
	bool something;
#endif

	{
		if
		:: admitted[me] == 2
		:: else -> attach()
		fi;
		do
		:: how -> break
		:: !how ->
R1:			if
			:: published != next ->
R2:				receive()
			:: else -> wait_for_data()
			fi
#ifdef LEAVES
		:: me == 0 && !how ->
			how = HOW_LEFT;
L1:			atomic {
				counted[me] = false;
				STORE(to_memory_r[me], LEFT + PLACE(me), OCCUPANT_GENERATION(me))
			};
			goto R4
#endif
		od;
over:		check_end()
	} UNLESS_DEAD(reader_died[me]);
	atomic {
		counted[me] = false;
		/* Nobody minds a goodbye after the writer's. */
		reader_ended[me] = (how != HOW_CLOSED && how != HOW_WRITER_DEAD && how != HOW_REFUSED)
	}
}
