/* SPDX-License-Identifier: Apache-2.0 */
/* doctor_internal.h - what the files of tnd_doctor() share */
#ifndef TND_DOCTOR_INTERNAL_H
#define TND_DOCTOR_INTERNAL_H

#include <tundish/doctor.h>

struct tnd__doctor {
	tnd_check_fn fn;
	void *arg;
	int bad;
};

/* Tells one finding; `advice` only where it is not ok. */
void tnd__doctor_tell(struct tnd__doctor *doctor, const char *name, int ok, const char *advice,
		      const char *format, ...) __attribute__((format(printf, 5, 6)));

/* doctor_file.c: the checks of one file. Return: 0, -errno. */
int tnd__doctor_path(struct tnd__doctor *doctor, const char *path, struct tnd_error *reterr);

#endif
