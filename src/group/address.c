/* SPDX-License-Identifier: Apache-2.0 */
/* address.c - addresses as texts: "unix:@NAME" and "unix:/PATH" */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "service_internal.h"

#define PREFIX "unix:"
#define PREFIX_BYTES (sizeof(PREFIX) - 1)
/* sun_path holds a path and its NUL, or the NUL of the abstract names and a name. */
#define NAME_BYTES_MAX (sizeof(((struct sockaddr_un *)0)->sun_path) - 1)
#define SHOWN_BYTES 200

static int refuse(struct tnd_error *reterr, const char *address, const char *why)
{
	char shown[SHOWN_BYTES];

	return tnd__fail_plain(reterr, TND_E_ADDRESS,
			       "address '%s' %s; give \"unix:@NAME\" or \"unix:/PATH\"",
			       tnd__printable(address, strlen(address), shown, sizeof(shown)), why);
}

/* What is behind "unix:", or "unix:@". NULL with `*ret_why` if the form is wrong. */
static const char *name_of(const char *address, const char **ret_why)
{
	const char *name = address + PREFIX_BYTES;

	if (strncmp(address, PREFIX, PREFIX_BYTES) != 0) {
		*ret_why = "does not begin with \"unix:\"";
		return NULL;
	}
	if (*name != '@' && *name != '/') {
		*ret_why = "has neither '@' nor an absolute path behind \"unix:\"";
		return NULL;
	}
	for (const char *at = name; *at; at++)
		if ((unsigned char)*at < ' ' || *at == 0x7f) {
			*ret_why = "has control characters in it";
			return NULL;
		}
	if (!name[1]) {
		*ret_why = "has an empty name";
		return NULL;
	}
	return *name == '@' ? name + 1 : name;
}

int tnd__address_parse(const char *address, struct sockaddr_un *ret_name, socklen_t *ret_bytes,
		       struct tnd_error *reterr)
{
	const char *why = NULL, *name;
	bool abstract;
	size_t bytes;

	if (!address)
		return tnd__fail_plain(
			reterr, TND_E_ADDRESS,
			"no address was given; give \"unix:@NAME\" or \"unix:/PATH\"");
	name = name_of(address, &why);
	if (!name)
		return refuse(reterr, address, why);
	bytes = strlen(name);
	if (bytes > NAME_BYTES_MAX)
		return tnd__fail_plain(reterr, TND_E_ADDRESS,
				       "the name in the address has %zu bytes, a socket takes %zu; "
				       "give a shorter one (begins '%.40s')",
				       bytes, NAME_BYTES_MAX, name);
	abstract = *name != '/' || name[-1] == '@';
	memset(ret_name, 0, sizeof(*ret_name));
	ret_name->sun_family = AF_UNIX;
	memcpy(ret_name->sun_path + (abstract ? 1 : 0), name, bytes);
	*ret_bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + bytes + 1);
	return 0;
}

int tnd__address_fresh(char address[TND__ADDRESS_BYTES], struct tnd_error *reterr)
{
	uint64_t random;
	int rc = tnd__failpoint("group.random");

	if (rc == 0 && getrandom(&random, sizeof(random), 0) != (ssize_t)sizeof(random))
		rc = -errno;
	if (rc < 0)
		return tnd__fail_plain(reterr, rc,
				       "no random number for a fresh address: %s; give an address",
				       tnd_strerror(rc));
	snprintf(address, TND__ADDRESS_BYTES, PREFIX "@tundish-%ld-%016" PRIx64, (long)getpid(),
		 random);
	return 0;
}
