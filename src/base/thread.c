/* SPDX-License-Identifier: Apache-2.0 */
/* thread.c - threads of the library: small stacks, and no signal of the program ends up in one */
#include <signal.h>

#include "base.h"

#define STACK_BYTES TND__KIB(256)

int tnd__thread_create(void *(*run)(void *), void *arg, pthread_t *ret_thread)
{
	sigset_t all, before;
	pthread_attr_t attr;
	int rc = -pthread_attr_init(&attr);

	if (rc < 0)
		return rc;
	pthread_attr_setstacksize(&attr, STACK_BYTES);
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	rc = -pthread_create(ret_thread, &attr, run, arg);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	pthread_attr_destroy(&attr);
	return rc;
}
