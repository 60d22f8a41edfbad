/* SPDX-License-Identifier: Apache-2.0 */
/* stat_output.h - between cmd_stat.c and the three forms that it prints */
#ifndef TND_STAT_OUTPUT_H
#define TND_STAT_OUTPUT_H

#include "tool.h"

/* "missing", "alive", "stopped", "dead", "left", "evicted": of a TND_READER_*. */
const char *stat_state_name(uint32_t state);
/* "alone", "member", "reader": of a TND_STAT_LOAD_*. */
const char *stat_role_name(uint32_t role);

/* Tables within 80 columns, or a sentence. Return: status. */
int stat_print_text(const struct tnd_stat *stat);
/* `line`: the document on one line. Return: status. */
int stat_print_json(const struct tnd_stat *stat, bool line);
/* Prometheus' text format. Return: status. */
int stat_print_prometheus(const struct tnd_stat *stat);

#endif
