/* SPDX-License-Identifier: Apache-2.0 */
/* bridge_wire.c - the messages: packed, checked, sent; and what both sides need */
#include <endian.h>
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "bridge_internal.h"

static const unsigned char magic[4] = {'T', 'N', 'D', 'B'};

static void put16(unsigned char *at, uint32_t value)
{
	uint16_t word = htole16((uint16_t)value);

	memcpy(at, &word, sizeof(word));
}

static void put64(unsigned char *at, uint64_t value)
{
	value = htole64(value);
	memcpy(at, &value, sizeof(value));
}

static uint32_t get16(const unsigned char *at)
{
	uint16_t word;

	memcpy(&word, at, sizeof(word));
	return le16toh(word);
}

static uint64_t get64(const unsigned char *at)
{
	uint64_t value;

	memcpy(&value, at, sizeof(value));
	return le64toh(value);
}

int tnd__bridge_unpack(zmq_msg_t *message, struct tnd__bridge_head *ret_head)
{
	const unsigned char *at = zmq_msg_data(message);
	size_t bytes = zmq_msg_size(message);

	if (bytes < 8 || memcmp(at, magic, sizeof(magic)) != 0)
		return TND_E_CORRUPT;
	ret_head->version = get16(at + 4);
	ret_head->kind = get16(at + 6);
	if (ret_head->version != BRIDGE_VERSION)
		return TND_E_VERSION;
	if (bytes < BRIDGE_HEAD_BYTES)
		return TND_E_CORRUPT;
	if (ret_head->kind != BRIDGE_OBJECT && ret_head->kind != BRIDGE_REFUSE &&
	    bytes != BRIDGE_HEAD_BYTES)
		return TND_E_CORRUPT;
	ret_head->session = get64(at + 8);
	ret_head->receiver = get64(at + 16);
	ret_head->number = get64(at + 24);
	ret_head->written = get64(at + 32);
	ret_head->objects = get64(at + 40);
	ret_head->bytes = get64(at + 48);
	ret_head->value = (int64_t)get64(at + 56);
	return 0;
}

int tnd__bridge_send_route(void *socket, const void *route, size_t bytes)
{
	if (zmq_send(socket, route, bytes, ZMQ_DONTWAIT | ZMQ_SNDMORE) < 0)
		return tnd__bridge_errno();
	return 0;
}

static void pack(const struct tnd__bridge_head *head, unsigned char *bytes)
{
	memcpy(bytes, magic, sizeof(magic));
	put16(bytes + 4, BRIDGE_VERSION);
	put16(bytes + 6, head->kind);
	put64(bytes + 8, head->session);
	put64(bytes + 16, head->receiver);
	put64(bytes + 24, head->number);
	put64(bytes + 32, head->written);
	put64(bytes + 40, head->objects);
	put64(bytes + 48, head->bytes);
	put64(bytes + 56, (uint64_t)head->value);
}

int tnd__bridge_send(void *socket, const struct tnd__bridge_head *head, const void *body,
		     size_t bytes)
{
	zmq_msg_t message;
	int rc;

	if (zmq_msg_init_size(&message, BRIDGE_HEAD_BYTES + bytes) < 0)
		return -ENOMEM;
	pack(head, zmq_msg_data(&message));
	if (bytes)
		memcpy((unsigned char *)zmq_msg_data(&message) + BRIDGE_HEAD_BYTES, body, bytes);
	if (zmq_msg_send(&message, socket, ZMQ_DONTWAIT) >= 0)
		return 0;
	rc = tnd__bridge_errno();
	zmq_msg_close(&message);
	return rc;
}

const unsigned char *tnd__bridge_body(zmq_msg_t *message, size_t *ret_bytes)
{
	*ret_bytes = zmq_msg_size(message) - BRIDGE_HEAD_BYTES;
	return (unsigned char *)zmq_msg_data(message) + BRIDGE_HEAD_BYTES;
}

void tnd__bridge_text(zmq_msg_t *message, char out[BRIDGE_TEXT_MAX + 1])
{
	size_t bytes;
	const unsigned char *text = tnd__bridge_body(message, &bytes);

	if (bytes > BRIDGE_TEXT_MAX)
		bytes = BRIDGE_TEXT_MAX;
	for (size_t i = 0; i < bytes; i++)
		out[i] = text[i] >= ' ' && text[i] < 127 ? (char)text[i] : '?';
	out[bytes] = '\0';
}

int tnd__bridge_fail(struct tnd_error *error, int code, const char *format, ...)
{
	va_list list;

	if (!error)
		return code;
	memset(error, 0, sizeof(*error));
	error->code = code;
	error->rank = -1;
	error->byte_offset = TND_ERROR_NO_OFFSET;
	va_start(list, format);
	vsnprintf(error->message, sizeof(error->message), format, list);
	va_end(list);
	return code;
}

int tnd__bridge_errno(void)
{
	int code = zmq_errno();

	return code > 0 && code < ZMQ_HAUSNUMERO ? -code : -EIO;
}

int64_t tnd__bridge_now_ns(void)
{
	return tnd_deadline_in(0);
}

void tnd__bridge_await(void *socket)
{
	zmq_pollitem_t item = {.socket = socket, .events = ZMQ_POLLIN};

	(void)zmq_poll(&item, 1, 20);
}

int tnd__bridge_thread(void *(*run)(void *), void *arg, pthread_t *ret_thread)
{
	sigset_t all, before;
	int rc;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	rc = pthread_create(ret_thread, NULL, run, arg);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return -rc;
}
