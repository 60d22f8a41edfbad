/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_bridge.c - `tundish bridge`: a channel's objects on another machine */
#include "tool.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include <tundish/bridge.h>

enum {
	KEY_FROM = TOOL_KEY,
	KEY_LISTEN,
	KEY_CONNECT,
	KEY_TO,
	KEY_MAX_BYTES,
	KEY_MAX_OBJECTS,
	KEY_MAX_OBJECT_BYTES,
	KEY_READERS,
	KEY_PLACES,
	KEY_RANK,
	KEY_RECEIVERS,
	KEY_ON_LOST,
	KEY_ON_DEAD,
	KEY_GRACE,
	KEY_DEADLINE,
	KEY_SECRET
};

struct bridge_command {
	struct tnd_bridge_listen_opts listen;
	struct tnd_bridge_connect_opts connect;
	const char *secret_path;
	double grace_seconds, deadline_seconds;
	uint32_t places;
	const char *one_sided[2]; /* the last option that only the listening, connecting side has */
};

static const struct argp_option options[] = {
	{"from", KEY_FROM, "ADDRESS", 0, "Of the channel here whose objects are sent", 0},
	{"listen", KEY_LISTEN, "ENDPOINT", 0, "tcp://HOST:PORT that others connect to", 0},
	{"connect", KEY_CONNECT, "ENDPOINT", 0, "tcp://HOST:PORT of the other side", 1},
	{"to", KEY_TO, "ADDRESS", 0, "Of the channel that is made here", 1},
	{"max-bytes", KEY_MAX_BYTES, "SIZE", 0, "Limit of that channel (default 4 MiB)", 1},
	{"max-objects", KEY_MAX_OBJECTS, "N", 0, "Limit of that channel (default 1024)", 1},
	{"readers", KEY_READERS, "N", 0,
	 "Ranks 0 to N-1 that objects are held for (default 1; 0: none)", 1},
	{"max-object-bytes", KEY_MAX_OBJECT_BYTES, "SIZE", OPTION_HIDDEN,
	 "Longest object (default 1 GiB)", 1},
	{"places", KEY_PLACES, "N", OPTION_HIDDEN, "For readers in all (default 64)", 1},
	{"on-dead", KEY_ON_DEAD, "WHAT", OPTION_HIDDEN,
	 "When a reader dies: fail or continue (default fail)", 1},
	{"rank", KEY_RANK, "R", OPTION_HIDDEN, "As which --from attaches (default 1000000)", 0},
	{"receivers", KEY_RECEIVERS, "N", 0,
	 "How many must connect before the first object is sent (default 1)", 0},
	{"on-lost", KEY_ON_LOST, "WHAT", 0,
	 "When a receiver is lost: fail or continue (default fail)", 0},
	{"grace", KEY_GRACE, "S", 0, "The other side is lost after this silence (default 10)", 2},
	{"deadline", KEY_DEADLINE, "S", 0, "Fail after S seconds", 2},
	{"secret", KEY_SECRET, "FILE", 0, "64 hex digits that both sides share: encrypts", 2},
	{0},
};

static const struct tool_choice fail_or_continue[] = {{"fail", 0}, {"continue", 1}};

static bool parse_connect(int key, char *arg, struct argp_state *state,
			  struct bridge_command *command)
{
	struct tnd_bridge_connect_opts *connect = &command->connect;

	switch (key) {
	case KEY_CONNECT:
		connect->endpoint = arg;
		return true;
	case KEY_TO:
		connect->to = arg;
		return true;
	case KEY_MAX_BYTES:
		connect->max_bytes = tool_positive_size(state, "--max-bytes", arg);
		return true;
	case KEY_MAX_OBJECTS:
		connect->max_objects =
			tool_number(state, "--max-objects", arg, 1, TND_CHANNEL_OBJECTS_MAX);
		return true;
	case KEY_MAX_OBJECT_BYTES:
		connect->max_object_bytes = tool_positive_size(state, "--max-object-bytes", arg);
		return true;
	case KEY_READERS:
		connect->reserved_readers =
			(uint32_t)tool_number(state, "--readers", arg, 0, TND_CHANNEL_READERS_MAX);
		return true;
	case KEY_PLACES:
		command->places =
			(uint32_t)tool_number(state, "--places", arg, 1, TND_CHANNEL_READERS_MAX);
		return true;
	case KEY_ON_DEAD:
		connect->on_dead = TOOL_CHOOSE(state, "--on-dead", arg, fail_or_continue);
		return true;
	default:
		return false;
	}
}

static bool parse_listen(int key, char *arg, struct argp_state *state,
			 struct bridge_command *command)
{
	struct tnd_bridge_listen_opts *listen = &command->listen;

	switch (key) {
	case KEY_FROM:
		listen->from = arg;
		return true;
	case KEY_LISTEN:
		listen->endpoint = arg;
		return true;
	case KEY_RANK:
		listen->rank = (uint32_t)tool_number(state, "--rank", arg, 0, INT32_MAX - 1);
		listen->rank_given = 1;
		return true;
	case KEY_RECEIVERS:
		listen->receiver_count = (uint32_t)tool_number(state, "--receivers", arg, 1,
							       TND_BRIDGE_RECEIVERS_MAX);
		return true;
	case KEY_ON_LOST:
		listen->on_lost = TOOL_CHOOSE(state, "--on-lost", arg, fail_or_continue);
		return true;
	default:
		return false;
	}
}

static const char *option_name(int key)
{
	for (size_t i = 0; options[i].name; i++)
		if (options[i].key == key)
			return options[i].name;
	return "";
}

/* One side or the other, and complete. */
static void settle(struct argp_state *state, struct bridge_command *command)
{
	struct tnd_bridge_connect_opts *connect = &command->connect;

	if (command->one_sided[0] && command->one_sided[1])
		argp_error(state,
			   "--%s is for the side of --from and --listen, --%s for that of "
			   "--connect and --to: give one side's",
			   command->one_sided[0], command->one_sided[1]);
	if (!(command->listen.from && command->listen.endpoint) &&
	    !(connect->endpoint && connect->to))
		argp_error(state, "expected --from and --listen, or --connect and --to");
	if (connect->reserved_readers > command->places)
		argp_error(state, "--readers: expected at most --places = %u, found '%u'",
			   command->places, connect->reserved_readers);
	connect->open_readers = command->places - connect->reserved_readers;
	if (command->grace_seconds &&
	    (command->grace_seconds < 0.1 || command->grace_seconds > 86400))
		argp_error(state, "--grace: expected 0.1 to 86400 seconds");
	command->listen.grace_ns = connect->grace_ns = (int64_t)(command->grace_seconds * 1e9);
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
	struct bridge_command *command = state->input;

	if (parse_listen(key, arg, state, command)) {
		command->one_sided[0] = option_name(key);
		return 0;
	}
	if (parse_connect(key, arg, state, command)) {
		command->one_sided[1] = option_name(key);
		return 0;
	}
	switch (key) {
	case KEY_GRACE:
		command->grace_seconds = tool_seconds(state, "--grace", arg);
		return 0;
	case KEY_DEADLINE:
		command->deadline_seconds = tool_seconds(state, "--deadline", arg);
		return 0;
	case KEY_SECRET:
		command->secret_path = arg;
		return 0;
	case ARGP_KEY_ARG:
		argp_error(state, "expected options only, found '%s'", arg);
		return 0;
	case ARGP_KEY_END:
		settle(state, command);
		return 0;
	default:
		return ARGP_ERR_UNKNOWN;
	}
}

static const struct argp_child children[] = {{&tool_common_argp, 0, NULL, 0}, {0}};
static const struct argp argp = {
	.options = options,
	.parser = parse,
	.args_doc = "",
	.doc = "Sends the objects of a channel to another machine, where they are in a channel "
	       "again: one side with --from and --listen, the other with --connect and --to. "
	       "Whoever reaches the port can connect, unless --secret is given: listen on a "
	       "private "
	       "address.",
	.children = children};

/* -- the secret -- */

static int hex_digit(char c)
{
	static const char digits[] = "0123456789abcdef0123456789ABCDEF";
	const char *at = c ? strchr(digits, c) : NULL;

	return at ? (int)(at - digits) % 16 : -1;
}

static int read_text(const char *path, char *out, size_t out_bytes)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t got = fd < 0 ? -1 : read(fd, out, out_bytes);
	int rc = got < 0 ? -errno : (int)got;

	if (fd >= 0)
		close(fd);
	return rc;
}

static int read_secret(const char *path, unsigned char secret[TND_BRIDGE_SECRET_BYTES])
{
	char text[TND_BRIDGE_SECRET_BYTES * 2 + 2] = "";
	int got = read_text(path, text, sizeof(text) - 1), bad = 0;

	if (got < 0)
		return tool_fail_what(got, path);
	for (int i = 0; i < TND_BRIDGE_SECRET_BYTES; i++) {
		int high = hex_digit(text[2 * i]), low = high < 0 ? -1 : hex_digit(text[2 * i + 1]);

		bad |= low < 0;
		secret[i] = (unsigned char)(low < 0 ? 0 : high * 16 + low);
	}
	explicit_bzero(text, sizeof(text));
	if (!bad)
		return TOOL_OK;
	fprintf(stderr, "tundish: %s: expected 64 hex digits, found something else\n", path);
	return TOOL_REFUSED;
}

/* -- running -- */

static struct tnd_bridge *_Atomic running;

static void on_signal(int number)
{
	struct tnd_bridge *bridge = running;

	(void)number;
	if (bridge)
		tnd_bridge_cancel(bridge);
	else
		_exit(TOOL_INTERRUPTED);
}

static void catch_signals(void)
{
	static const int endings[] = {SIGINT, SIGTERM, SIGHUP};
	struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};

	for (size_t i = 0; i < sizeof(endings) / sizeof(endings[0]); i++) {
		struct sigaction before;

		/* nohup means it. */
		if (sigaction(endings[i], NULL, &before) == 0 && before.sa_handler == SIG_IGN)
			continue;
		sigaction(endings[i], &action, NULL);
	}
}

static void print_summary(struct tnd_bridge *bridge, bool listens, double seconds)
{
	struct tnd_bridge_stats stats = {.struct_bytes = sizeof(stats)};
	char size[TND_SIZE_TEXT_MAX];

	if (tnd_bridge_stats(bridge, &stats) < 0)
		return;
	tnd_size_format(stats.bytes, size);
	printf("%s %" PRIu64 " objects, %s, in %.1f s", listens ? "sent" : "received",
	       stats.objects, size, seconds);
	if (stats.reconnects)
		printf("; %" PRIu64 " reconnects, %" PRIu64 " objects repeated", stats.reconnects,
		       stats.repeated);
	if (stats.lost)
		printf("; %" PRIu64 " receivers lost", stats.lost);
	if (stats.refused)
		printf("; %" PRIu64 " messages refused", stats.refused);
	puts("");
}

static int run(struct tnd_bridge *bridge, bool listens, double deadline_seconds)
{
	struct tnd_error error = {0};
	int64_t started = tool_now_ns(), deadline = TND_NO_DEADLINE;
	int rc;

	if (deadline_seconds)
		deadline = tnd_deadline_in((int64_t)(deadline_seconds * 1e9));
	if (listens)
		printf("listening on %s\n", tnd_bridge_endpoint(bridge));
	else
		printf("channel at %s\n", tnd_bridge_address(bridge));
	fflush(stdout);
	running = bridge;
	rc = tnd_bridge_run(bridge, deadline, &error);
	print_summary(bridge, listens, (double)(tool_now_ns() - started) / 1e9);
	rc = rc < 0 ? tool_fail(rc, &error) : TOOL_OK;
	/* Telling the other side takes a second at most; a signal that comes now changes nothing. */
	running = NULL;
	signal(SIGINT, SIG_IGN);
	signal(SIGTERM, SIG_IGN);
	signal(SIGHUP, SIG_IGN);
	tnd_bridge_close(bridge);
	return rc;
}

int cmd_bridge(int argc, char **argv)
{
	struct bridge_command command = {
		.listen.struct_bytes = sizeof(command.listen),
		.connect.struct_bytes = sizeof(command.connect),
		.connect.reserved_readers = 1,
		.places = TND_CHANNEL_READERS_MAX,
	};
	unsigned char secret[TND_BRIDGE_SECRET_BYTES];
	struct tnd_error error = {0};
	struct tnd_bridge *bridge;
	bool listens;
	int rc;

	tool_parse(&argp, argc, argv, &command);
	listens = command.listen.from != NULL;
	if (command.secret_path) {
		rc = read_secret(command.secret_path, secret);
		if (rc != TOOL_OK)
			return rc;
		command.listen.secret = command.connect.secret = secret;
	}
	catch_signals();
	rc = listens ? tnd_bridge_listen(&command.listen, &bridge, &error)
		     : tnd_bridge_connect(&command.connect, &bridge, &error);
	explicit_bzero(secret, sizeof(secret));
	if (rc < 0)
		return tool_fail(rc, &error);
	return run(bridge, listens, command.deadline_seconds);
}
