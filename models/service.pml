/* SPDX-License-Identifier: Apache-2.0 */
/* service.pml - the service threads, and what befalls the others */

/* A1 to A5 for reader r */
inline admit(r)
{
	take_lock();
#ifndef M_A12
A1:	generation_changed = true;
#endif
A2:	if
	:: RESERVED_FOR(r) -> first = START
	:: else -> first = published
	fi;
#ifdef M_A12
A1:	generation_changed = true;
#endif
	held[r] = first;
A3:	d_step {
		cursor[PLACE(r)] = first;
		left[PLACE(r)] = 0;
		seat_generation[PLACE(r)] = OCCUPANT_GENERATION(r);
		first = 0
	};
A4:	d_step {
		seat[PLACE(r)] = LIVE;
		in_set = in_set | (1 << PLACE(r));
		counted[r] = true
	};
	lock = false;
A5:	admitted[r] = 2
}

/* A reader died whose place is still its own, and the program is asked to evict it. */
inline report_death(r)
{
	take_lock();
P1:	d_step { dead_set = dead_set | (1 << PLACE(r)) };
	generation_changed = true;
	wake_both();
	lock = false
}

#define HAS_PLACE(r) (seat[PLACE(r)] != EVICTED && seat_generation[PLACE(r)] == OCCUPANT_GENERATION(r))

/* A place is not given again before the service has seen its last occupant's process go. */
#ifdef M_REUSE
#define IS_VACANT(r) (seat[PLACE(r)] != LIVE)
#else
#define IS_VACANT(r) (seat[PLACE(r)] != LIVE && (PLACE(r) == (r) || gone_seen[0]))
#endif
#define ASKS(r) (admitted[r] == 1 && !reader_ended[r] && IS_VACANT(r))
#define IS_GONE(r) (reader_ended[r] && !gone_seen[r])

#ifdef DEAD_ERROR
#define MUST_REPORT(r) (reader_died[r])
#else
#define MUST_REPORT(r) false
#endif

#define NOBODY READERS

proctype service()
{
	byte first, who;
	bool gone_seen[READERS];

	{
		who = NOBODY;
end:		do
		:: atomic { ASKS(0) -> who = 0 }; goto admission
		:: atomic { IS_GONE(0) -> gone_seen[0] = true; who = (HAS_PLACE(0) -> 0 : NOBODY) }
#if READERS > 1
		:: atomic { ASKS(1) -> who = 1 }; goto admission
		:: atomic { IS_GONE(1) -> gone_seen[1] = true; who = (HAS_PLACE(1) -> 1 : NOBODY) }
#endif
		:: atomic { evict_wanted -> evict_wanted = false; who = (HAS_PLACE(0) -> 0 : NOBODY) }
		:: atomic { who != NOBODY && MUST_REPORT(who) }; report_death(who); who = NOBODY
		:: atomic { who != NOBODY && !MUST_REPORT(who) }; evict(PLACE(who), who); who = NOBODY
		od;
admission:	admit(who);
		who = NOBODY;
		goto end
	} UNLESS_DEAD(writer_died)
}

/* Of a reader's process. */
proctype guest(byte me)
{
end:	writer_died;
P1:	writer_is_dead[me] = true;
P2:	local_word_changed[me] = true;
P3:	reader_asleep[me] = false
}

#ifdef HAS_FATE
/*
 * At some moment, one of what the configuration allows. A wake that is lost before hides behind
 * it: the same configuration without a fate has to be checked as well.
 */
proctype fate()
{
	if
#ifdef READER_DIES
	:: true -> reader_died[0] = true
#endif
#ifdef WRITER_DIES
	:: true -> writer_died = true
#endif
#ifdef EVICTS
	:: true -> evict_wanted = true
#endif
#ifdef NEEDLESS_WAKES
	:: writer_asleep -> writer_asleep = false
	:: reader_asleep[0] -> reader_asleep[0] = false
	:: true
#endif
	fi
}
#endif
