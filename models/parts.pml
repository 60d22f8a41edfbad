/* SPDX-License-Identifier: Apache-2.0 */
/* parts.pml - pieces of the protocol that more than one process runs */

inline take_lock()
{
	atomic { !lock -> lock = true }
}

/* E1 to E5 of place p, whose occupant is r. */
inline evict(p, r)
{
	take_lock();
#ifndef M_E1
E1:	d_step { seat[p] = EVICTED; counted[r] = false };
#endif
E2:	d_step { /* under `lock`: nobody sees it before E3 */
		in_set = in_set & ~(1 << p);
		dead_set = dead_set & ~(1 << p);
E3:		generation_changed = true
	};
E4:	sleepers = sleepers & ~(1 << p);
#ifdef M_E1
	lock = false;
	d_step { seat[p] = EVICTED; counted[r] = false };
	take_lock();
#endif
E5:	wake_both();
	lock = false
}

inline wake_both()
{
#ifdef M_E5
	skip
#else
	d_step { space_word_changed = true; bump_data_word() };
	d_step { writer_asleep = false; wake_readers() }
#endif
}

/* R4 to R7 of a reader; L1 is followed by the same. */
inline tell_writer()
{
	if
	:: atomic { writer_waiting -> same_episode[me] = true };
R5:		space_word_changed = true;
R6:		writer_asleep = false;
R7:		atomic {
			empty_buffer(to_memory_r[me]);
#ifdef M_R7
			writer_waiting = false;
#else
			if
			:: writer_waiting && same_episode[me] -> writer_waiting = false
			:: else
			fi;
#endif
			same_episode[me] = false
		}
	:: else
	fi
}
