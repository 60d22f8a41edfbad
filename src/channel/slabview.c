/* SPDX-License-Identifier: Apache-2.0 */
/*
 * slabview.c - objects by slab: the readers' side
 *
 *      writer's service           our service thread             receiving thread
 *      HERE, descriptor --------> check, map: a view  ---------> hold on the view, lease, borrow
 *      RETIRE ------------------> unmap, once no hold is left
 *                <--------------- ASK ------------------------- no view yet: waits for it
 *
 * The descriptor is sent before the object is published, but may be seen after it. The receiving
 * thread then asks and waits, with its deadline, for our own service thread.
 *
 * A view that is held outlives its retirement: a working writer retires only what nobody holds, but
 * it may have given us up, or be broken. What is mapped cannot be cut (seals), and the pages of an
 * object are seen to be there before it is handed out (viewpages.c).
 *
 * Views and holds are under `lock`.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bigobject.h"
#include "segment.h"

/* Tickets of objects by slab: as far as can be from what the ring uses for the same object. */
#define TICKET_SLAB (UINT64_C(1) << 63)

int tnd__slabs_guest(struct tnd_channel *channel)
{
	channel->slabs =
		tnd__failpoint("channel.alloc") < 0 ? NULL : calloc(1, sizeof(*channel->slabs));
	if (!channel->slabs)
		return -ENOMEM;
	channel->slabs->pagemap_fd = -1;
	channel->slabs->private_views = channel->private_views;
	if (channel->private_views)
		tnd__views_open_pagemap(channel->slabs);
	return 0;
}

static void free_view(struct tnd__view *view)
{
	tnd__view_unmap(view);
	close(view->fd);
	free(view);
}

void tnd__views_close(struct tnd__slabs *slabs)
{
	while (slabs->views) {
		struct tnd__view *view = slabs->views;

		slabs->views = view->next;
		free_view(view);
	}
	free(slabs->holds);
	if (slabs->pagemap_fd >= 0)
		close(slabs->pagemap_fd);
}

/* Under lock, as all of the following. */
static struct tnd__view *find_view(const struct tnd__slabs *slabs, uint64_t serial)
{
	struct tnd__view *view = slabs->views;

	while (view && (view->serial != serial || view->leaving))
		view = view->next;
	return view;
}

/* Unmaps what is retired and not held. */
static void sweep(struct tnd__slabs *slabs)
{
	struct tnd__view **link = &slabs->views;

	while (*link) {
		struct tnd__view *view = *link;

		if (view->retired && !view->holds) {
			*link = view->next;
			free_view(view);
		} else {
			link = &view->next;
		}
	}
}

/*
 * `fd` stays the caller's on failure. Mapped at once, so that the first borrow finds it; a private
 * view later: under mlockall() the kernel copies all of it there and then.
 * Return: 0; TND_E_CORRUPT; -ENOMEM; -errno.
 */
static int make_view(const struct tnd__slabs *slabs, const struct tnd__slab_note *note, int fd,
		     struct tnd__view **ret_view)
{
	int seals = fcntl(fd, F_GET_SEALS), rc = tnd__failpoint("channel.view");
	struct tnd__view *view;
	struct stat stat;

	if (rc < 0)
		return rc;
	if (seals < 0 || (seals & TND__SLAB_SEALS) != TND__SLAB_SEALS || fstat(fd, &stat) < 0 ||
	    !note->bytes || note->bytes % TND__PAGE || note->bytes > 2 * TND__SEGMENT_BYTES_MAX ||
	    (uint64_t)stat.st_size != note->bytes)
		return TND_E_CORRUPT;
	view = calloc(1, sizeof(*view));
	if (!view)
		return -ENOMEM;
	view->serial = note->serial;
	view->bytes = note->bytes;
	view->index = note->index;
	view->fd = fd;
	if (!slabs->private_views)
		rc = tnd__view_map(slabs, view);
	if (rc < 0) {
		free(view);
		return rc;
	}
	*ret_view = view;
	return 0;
}

/* A descriptor came. An index has one slab at a time: what was there before is retired. */
static void add_view(struct tnd__slabs *slabs, const struct tnd__slab_note *note,
		     struct tnd__packet *packet)
{
	struct tnd__view *view;
	int rc;

	if (find_view(slabs, note->serial))
		return;
	for (view = slabs->views; view; view = view->next)
		view->retired |= view->index == note->index;
	sweep(slabs);
	/* A packet comes without its descriptor where this process has none free. */
	rc = packet->fd_count == 1 ? make_view(slabs, note, packet->fds[0], &view) : -EMFILE;
	if (rc < 0) {
		slabs->failed_serial = note->serial;
		slabs->failed_code = rc;
		return;
	}
	packet->fds[0] = -1;
	view->next = slabs->views;
	slabs->views = view;
}

void tnd__slabs_arrived(struct tnd_channel *channel, struct tnd__packet *packet)
{
	struct tnd__slabs *slabs = channel->slabs;
	struct tnd__slab_note note;
	struct tnd__view *view;

	if (!tnd__packet_read(packet, &note, sizeof(note)))
		return;
	if (note.index >= TND__SLABS_MAX)
		return;
	pthread_mutex_lock(&channel->lock);
	if (note.what == TND__NOTE_HERE) {
		add_view(slabs, &note, packet);
	} else if (note.what == TND__NOTE_GONE) {
		slabs->failed_serial = note.serial;
		slabs->failed_code = TND_E_CORRUPT;
	} else if (note.what == TND__NOTE_RETIRE) {
		for (view = slabs->views; view; view = view->next)
			view->retired |= view->serial == note.serial;
		sweep(slabs);
	}
	pthread_mutex_unlock(&channel->lock);
	/* As P2, P3: a receiving thread may sleep. */
	atomic_fetch_add_explicit(&channel->local_word, 1, memory_order_seq_cst);
	tnd__futex_wake_local(&channel->local_word, INT_MAX);
}

/* -- waiting for a descriptor -- */

static int look_for_view(struct tnd__wait *wait, struct tnd_error *reterr)
{
	struct tnd_channel *channel = wait->channel;
	struct tnd__slabs *slabs = channel->slabs;
	/* Before the look: what the writer sent before its end has come by then. */
	bool over = atomic_load_explicit(&channel->reader.writer_dead, memory_order_seq_cst) ||
		    atomic_load_explicit(&channel->reader.writer_left, memory_order_seq_cst);
	int rc = 0;

	pthread_mutex_lock(&channel->lock);
	if (find_view(slabs, wait->need)) {
		rc = 1;
	} else if (slabs->failed_serial == wait->need) {
		rc = slabs->failed_code;
		slabs->failed_serial = 0; /* the next call asks again */
	}
	pthread_mutex_unlock(&channel->lock);
	if (rc < 0)
		return tnd__fail_plain(reterr, rc,
				       "expected the memory of an object by slab of channel '%s', "
				       "found %s; close, and attach again",
				       channel->shared.name, tnd_strerror(rc));
	if (rc == 0 && over)
		return tnd__fail_plain(reterr, TND_E_PEER_DEAD,
				       "expected the memory of an object by slab of channel '%s', "
				       "found that the writer (pid %" PRIu32
				       ") is gone; the object is lost",
				       channel->shared.name, channel->shared.writer_pid);
	return rc;
}

static int ask(struct tnd_channel *channel, uint64_t serial, uint32_t index)
{
	struct tnd__slab_note note = {serial, 0, index, TND__NOTE_ASK};
	struct tnd__packet packet;

	tnd__slab_packet(&note, -1, &packet);
	return tnd__peer_send(channel->reader.peer, &packet);
}

static int await_view(struct tnd_channel *channel, uint64_t serial, uint32_t index,
		      int64_t deadline_ns, struct tnd_error *reterr)
{
	struct tnd__wait wait = {.channel = channel,
				 .look = look_for_view,
				 .what = "the memory of an object by slab",
				 .need = serial};
	bool there;

	pthread_mutex_lock(&channel->lock);
	there = find_view(channel->slabs, serial) != NULL;
	pthread_mutex_unlock(&channel->lock);
	if (there)
		return 0;
	/* A writer that is gone does not answer, but its service may have sent it before. */
	if (ask(channel, serial, index) == -ENOMEM)
		return tnd__fail_plain(reterr, -ENOMEM,
				       "expected memory to ask for a slab of channel '%s', found "
				       "none",
				       channel->shared.name);
	return tnd__channel_wait(&wait, deadline_ns, reterr);
}

/* -- borrowing -- */

/* Under lock. Return: 0; TND_E_CORRUPT; -ENOMEM. */
static int hold(struct tnd_channel *channel, uint64_t serial, uint32_t index, uint64_t bytes,
		struct tnd_object *object)
{
	struct tnd__slabs *slabs = channel->slabs;
	struct tnd__view *view = find_view(slabs, serial);
	int rc = tnd__failpoint("channel.hold");

	if (rc == 0)
		rc = tnd__reserve(&slabs->holds, &slabs->hold_capacity, slabs->hold_count + 1,
				  sizeof(*slabs->holds));
	if (rc < 0)
		return rc;
	if (!view || view->index != index || bytes > view->bytes ||
	    !tnd__view_has_pages(view, bytes))
		return TND_E_CORRUPT;
	rc = tnd__view_map(slabs, view);
	if (rc < 0)
		return rc;
	object->data = view->data;
	object->bytes = bytes;
	object->ticket = channel->reader.next + TICKET_SLAB;
	slabs->holds[slabs->hold_count++] =
		(struct tnd__hold){.ticket = object->ticket, .bytes = bytes, .view = view};
	view->holds++;
	/* Before the cursor passes the object (R3); pairs with tnd__slab_is_free(). */
	atomic_fetch_add_explicit(&channel->shared.control->leases[channel->reader.place][index], 1,
				  memory_order_seq_cst);
	return 0;
}

int tnd__slabs_borrow(struct tnd_channel *channel, uint64_t place, uint64_t bytes,
		      int64_t deadline_ns, struct tnd_object *object, struct tnd_error *reterr)
{
	uint64_t serial = place >> 12;
	uint32_t index = place >> 6 & (TND__SLABS_MAX - 1);
	int rc = TND_E_CORRUPT;

	if (channel->slabs && channel->reader.peer && serial &&
	    tnd__slab_place(serial, index) == place) {
		rc = await_view(channel, serial, index, deadline_ns, reterr);
		if (rc < 0)
			return rc;
		pthread_mutex_lock(&channel->lock);
		rc = hold(channel, serial, index, bytes, object);
		pthread_mutex_unlock(&channel->lock);
	}
	if (rc < 0)
		return tnd__fail_plain(reterr, rc,
				       "expected slab %" PRIu32 " with %" PRIu64
				       " bytes of an object of channel '%s', found %s; close, and "
				       "attach again",
				       index, bytes, channel->shared.name, tnd_strerror(rc));
	return 0;
}

bool tnd__slabs_is(const struct tnd_channel *channel, const struct tnd_object *object)
{
	return object->ticket == object->number + channel->shared.first_number + TICKET_SLAB;
}

/* Open, and nobody is about to end it. Under lock. */
static struct tnd__hold *find_hold(const struct tnd__slabs *slabs, uint64_t ticket)
{
	for (size_t i = 0; i < slabs->hold_count; i++)
		if (slabs->holds[i].ticket == ticket && !slabs->holds[i].ending)
			return &slabs->holds[i];
	return NULL;
}

/* The lease ends. Under lock. */
static void end_hold(struct tnd_channel *channel, struct tnd__hold *hold)
{
	struct tnd__slabs *slabs = channel->slabs;
	struct tnd__view *view = hold->view;
	uint32_t index = view->index;

	*hold = slabs->holds[--slabs->hold_count];
	if (--view->holds == 0 && view->stale)
		tnd__view_unmap(view);
	sweep(slabs);
	/* After the reads, before R4; pairs with tnd__slab_is_free(). */
	atomic_fetch_sub_explicit(&channel->shared.control->leases[channel->reader.place][index], 1,
				  memory_order_seq_cst);
}

/* `hold` is this thread's to work on without the lock. Return: its ticket. */
static uint64_t begin_end(struct tnd_channel *channel, struct tnd__hold *hold)
{
	uint64_t ticket = hold->ticket;

	hold->ending = true;
	pthread_mutex_unlock(&channel->lock);
	return ticket;
}

/* Under lock again; others have come and gone meanwhile. */
static struct tnd__hold *end_end(struct tnd_channel *channel, uint64_t ticket)
{
	struct tnd__hold *hold;

	pthread_mutex_lock(&channel->lock);
	hold = channel->slabs->holds;
	while (hold->ticket != ticket)
		hold++;
	hold->ending = false;
	return hold;
}

/* What was written is gone before the lease is, so that the next contents are seen. Under lock. */
static struct tnd__hold *clean(struct tnd_channel *channel, struct tnd__hold *hold)
{
	struct tnd__view *view = hold->view;
	uint64_t bytes = hold->bytes, ticket = begin_end(channel, hold);
	bool worked = tnd__view_clean(channel->slabs, view, bytes);

	hold = end_end(channel, ticket);
	view->stale |= !worked;
	return hold;
}

int tnd__slabs_release(struct tnd_channel *channel, const struct tnd_object *object)
{
	struct tnd__slabs *slabs = channel->slabs;
	struct tnd__hold *hold;

	if (!slabs)
		return TND_E_INVALID;
	pthread_mutex_lock(&channel->lock);
	hold = find_hold(slabs, object->ticket);
	if (hold && slabs->private_views)
		hold = clean(channel, hold);
	if (hold)
		end_hold(channel, hold);
	pthread_mutex_unlock(&channel->lock);
	if (!hold)
		return TND_E_INVALID;
	tnd__wake_writer(channel);
	return 0;
}

int tnd__slabs_keep(struct tnd_channel *channel, uint64_t ticket,
		    const struct tnd__bulk_range *pages, size_t count, void **ret_base)
{
	struct tnd__slabs *slabs = channel->slabs;
	struct tnd__hold *hold;
	struct tnd__view *view;
	int rc;

	pthread_mutex_lock(&channel->lock);
	hold = find_hold(slabs, ticket);
	rc = !hold || (count && pages[count - 1].end > tnd__round_up(hold->bytes, TND__PAGE))
		     ? TND_E_INVALID
		     : 0;
	/* Two objects in one slab at a time: of a broken writer. */
	if (rc == 0 && hold->view->holds != 1)
		rc = TND_E_CORRUPT;
	if (rc < 0) {
		pthread_mutex_unlock(&channel->lock);
		return rc;
	}
	view = hold->view;
	view->leaving = true;
	begin_end(channel, hold);
	*ret_base = view->data + (count ? pages[0].begin : 0);
	rc = tnd__view_keep(slabs, view, pages, count);
	hold = end_end(channel, ticket);
	view->leaving = false;
	if (rc == 0)
		end_hold(channel, hold);
	pthread_mutex_unlock(&channel->lock);
	if (rc == 0)
		tnd__wake_writer(channel);
	return rc;
}
