/* SPDX-License-Identifier: Apache-2.0 */
/* tundish/tundish.h - everything but bridge.h, which has a library of its own (tundish-bridge) */
#ifndef TUNDISH_TUNDISH_H
#define TUNDISH_TUNDISH_H

#include <tundish/budget.h>
#include <tundish/channel.h>
#include <tundish/checkpoint.h>
#include <tundish/doctor.h>
#include <tundish/error.h>
#include <tundish/group.h>
#include <tundish/host.h>
#include <tundish/load.h>
#include <tundish/log.h>
#include <tundish/pagecache.h>
#include <tundish/plan.h>
#include <tundish/share.h>
#include <tundish/size.h>
#include <tundish/slab.h>
#include <tundish/stat.h>
#include <tundish/time.h>

#endif
