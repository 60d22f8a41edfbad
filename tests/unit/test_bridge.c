/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_bridge.c - what could break: an option that is taken although it means nothing; a run that
 * changes something when its deadline passes; a cancel that is lost; a part that is taken for the
 * whole. Writer, both sides and reader are in this process; figures and ends of each are compared.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <errno.h>
#include <pthread.h>
#include <string.h>

#include <tundish/bridge.h>

#define SECOND_NS INT64_C(1000000000)

struct scene {
	struct tnd_channel *writer, *reader;
	struct tnd_bridge *near, *far;
	struct tnd_error error;
};

static void open_near(struct scene *scene)
{
	struct tnd_channel_opts channel = {.struct_bytes = sizeof(channel), .open_readers = 2};
	struct tnd_bridge_listen_opts near = {.struct_bytes = sizeof(near),
					      .endpoint = "tcp://127.0.0.1:*"};

	assert_int_equal(tnd_channel_create(&channel, &scene->writer, &scene->error), 0);
	near.from = tnd_channel_address(scene->writer);
	assert_int_equal(tnd_bridge_listen(&near, &scene->near, &scene->error), 0);
}

static void open_far(struct scene *scene)
{
	struct tnd_bridge_connect_opts far = {.struct_bytes = sizeof(far), .reserved_readers = 1};

	far.endpoint = tnd_bridge_endpoint(scene->near);
	assert_int_equal(tnd_bridge_connect(&far, &scene->far, &scene->error), 0);
	assert_int_equal(tnd_channel_attach(tnd_bridge_address(scene->far), 0, NULL, &scene->reader,
					    &scene->error),
			 0);
}

static void close_all(struct scene *scene)
{
	tnd_bridge_close(scene->near);
	tnd_bridge_close(scene->far);
	tnd_channel_close(scene->reader);
	tnd_channel_close(scene->writer);
}

static void *run(void *arg)
{
	return (void *)(intptr_t)tnd_bridge_run(arg, tnd_deadline_in(60 * SECOND_NS), NULL);
}

static int result(pthread_t thread)
{
	void *value;

	assert_int_equal(pthread_join(thread, &value), 0);
	return (int)(intptr_t)value;
}

static int receive(struct scene *scene, uint32_t *ret_value)
{
	uint64_t bytes;

	return tnd_channel_recv(scene->reader, ret_value, sizeof(*ret_value),
				tnd_deadline_in(60 * SECOND_NS), &bytes, NULL);
}

static void read_numbers(struct scene *scene, uint32_t count)
{
	for (uint32_t i = 0; i < count; i++) {
		uint32_t value = UINT32_MAX;

		assert_int_equal(receive(scene, &value), 0);
		assert_int_equal(value, i);
	}
}

/* The far channel ends with its bridge. */
static void close_far(struct scene *scene, int end)
{
	uint32_t value;

	tnd_bridge_close(scene->far);
	scene->far = NULL;
	assert_int_equal(receive(scene, &value), end);
}

static void send_numbers(struct scene *scene, uint32_t count)
{
	for (uint32_t i = 0; i < count; i++)
		assert_int_equal(tnd_channel_send(scene->writer, &i, sizeof(i),
						  tnd_deadline_in(60 * SECOND_NS), NULL),
				 0);
}

static void test_all_arrives(void **state)
{
	struct tnd_bridge_stats stats = {.struct_bytes = sizeof(stats)};
	struct scene scene = {0};
	pthread_t near, far;

	(void)state;
	open_near(&scene);
	open_far(&scene);
	send_numbers(&scene, 1000);
	/* Both go on where their deadlines found them. */
	for (int i = 0; i < 5; i++) {
		assert_int_equal(tnd_bridge_run(scene.near, tnd_deadline_in(SECOND_NS / 50), NULL),
				 -ETIMEDOUT);
		assert_int_equal(tnd_bridge_run(scene.far, tnd_deadline_in(SECOND_NS / 50), NULL),
				 -ETIMEDOUT);
	}
	assert_int_equal(pthread_create(&near, NULL, run, scene.near), 0);
	assert_int_equal(pthread_create(&far, NULL, run, scene.far), 0);
	tnd_channel_close(scene.writer);
	scene.writer = NULL;
	read_numbers(&scene, 1000);
	assert_int_equal(result(near), 0);
	assert_int_equal(result(far), 0);
	assert_int_equal(tnd_bridge_run(scene.far, 0, NULL), 0);
	assert_int_equal(tnd_bridge_stats(scene.near, &stats), 0);
	assert_int_equal(stats.objects, 1000);
	assert_int_equal(stats.bytes, 4000);
	assert_int_equal(stats.held_objects, 0);
	assert_int_equal(tnd_bridge_stats(scene.far, &stats), 0);
	assert_int_equal(stats.objects, 1000);
	close_far(&scene, TND_E_CLOSED);
	close_all(&scene);
}

static void test_cancel(void **state)
{
	struct scene scene = {0};
	pthread_t near, far;

	(void)state;
	open_near(&scene);
	open_far(&scene);
	send_numbers(&scene, 10);
	assert_int_equal(pthread_create(&near, NULL, run, scene.near), 0);
	assert_int_equal(pthread_create(&far, NULL, run, scene.far), 0);
	read_numbers(&scene, 10);
	assert_int_equal(tnd_bridge_run(scene.near, 0, &scene.error), -EBUSY);
	tnd_bridge_cancel(scene.near);
	assert_int_equal(result(near), -ECANCELED);
	assert_int_equal(result(far), TND_E_PEER_DEAD);
	assert_int_equal(tnd_bridge_run(scene.near, 0, &scene.error), -ECANCELED);
	assert_int_equal(tnd_bridge_run(scene.far, 0, &scene.error), TND_E_PEER_DEAD);
	assert_non_null(strstr(scene.error.message, "before its writer closed"));
	close_far(&scene, TND_E_PEER_DEAD);
	close_all(&scene);
}

static void test_never_run(void **state)
{
	struct scene scene = {0};

	(void)state;
	open_near(&scene);
	open_far(&scene);
	tnd_bridge_cancel(scene.far);
	assert_int_equal(tnd_bridge_run(scene.far, TND_NO_DEADLINE, NULL), -ECANCELED);
	close_all(&scene);
	tnd_bridge_close(NULL);
}

static void test_options(void **state)
{
	const struct tnd_bridge_listen_opts good = {.struct_bytes = sizeof(good),
						    .from = "unix:@tundish-nobody",
						    .endpoint = "tcp://127.0.0.1:*"};
	struct tnd_bridge_listen_opts bad;
	struct tnd_bridge *bridge = NULL;
	struct tnd_error error;

#define REFUSED(field, value, wanted)                                       \
	bad = good;                                                         \
	bad.field = value;                                                  \
	assert_int_equal(tnd_bridge_listen(&bad, &bridge, &error), wanted); \
	assert_int_equal(error.code, wanted);                               \
	assert_true(strlen(error.message) > 10)

	(void)state;
	REFUSED(struct_bytes, 8, TND_E_INVALID);
	REFUSED(flags, 1, TND_E_INVALID);
	REFUSED(receiver_count, 65, TND_E_INVALID);
	REFUSED(on_lost, 2, TND_E_INVALID);
	REFUSED(grace_ns, -1, TND_E_INVALID);
	REFUSED(grace_ns, 1, TND_E_INVALID);
	REFUSED(endpoint, NULL, TND_E_ADDRESS);
	REFUSED(endpoint, "tcp://", TND_E_ADDRESS);
	REFUSED(endpoint, "tcp://:1", TND_E_ADDRESS);
	REFUSED(endpoint, "ipc://x:1", TND_E_ADDRESS);
	REFUSED(from, NULL, TND_E_ADDRESS);
	REFUSED(from, "unix:@tundish-nobody", -ECONNREFUSED);
#undef REFUSED
	assert_null(bridge);
}

static void test_port_taken(void **state)
{
	struct tnd_bridge_listen_opts opts = {.struct_bytes = sizeof(opts), .rank_given = 1};
	struct tnd_bridge *bridge = NULL;
	struct scene scene = {0};

	(void)state;
	open_near(&scene);
	opts.from = tnd_channel_address(scene.writer);
	opts.endpoint = tnd_bridge_endpoint(scene.near);
	assert_int_equal(tnd_bridge_listen(&opts, &bridge, &scene.error), -EADDRINUSE);
	assert_null(bridge);
	close_all(&scene);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_all_arrives), cmocka_unit_test(test_cancel),
		cmocka_unit_test(test_never_run),   cmocka_unit_test(test_options),
		cmocka_unit_test(test_port_taken),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
