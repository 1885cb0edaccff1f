/* SPDX-License-Identifier: Apache-2.0 */
/* The ways round of docs/threat-model.md, each tried by a process beside one that filled the slice. */
#ifndef BYPASS_H
#define BYPASS_H

#include "probe.h"

enum attempt { REFUSED, GRANTED, UNABLE };
/* Asks for memory beyond the limit, in a process of its own. */
typedef enum attempt (*way_round)(const struct fill *fill);

/* Found functions ask for more than is left of a full slice. */
enum attempt ask_beyond(const struct cuda *cuda, CUdevice device);
/* The same in a new program, this file or a copy of it: without what sets a library up, with these variables. */
enum attempt ask_as_program(const char *program, const char *const added[], CUdevice device);
int asked_as_program(const char *device); /* what main does there */
/* Copies a file; false: it cannot be. */
bool copy_file(const char *from, const char *to, int mode);
/* A name for a file of ours in a folder that can be written; NULL: there is none. */
const char *scratch_file(const char *name);

/* bypass_load.c */
enum attempt by_path(const struct fill *fill);
enum attempt by_copy(const struct fill *fill);
enum attempt by_namespace(const struct fill *fill);
enum attempt by_versioned_name(const struct fill *fill);
enum attempt by_symbol_table(const struct fill *fill);

/* bypass_program.c */
enum attempt without_preload(const struct fill *fill);
enum attempt with_other_preload(const struct fill *fill);
enum attempt with_own_limits(const struct fill *fill);
enum attempt with_setuid(const struct fill *fill);
enum attempt with_other_libcuda(const struct fill *fill);
enum attempt with_more_devices(const struct fill *fill);

/* bypass_files.c */
enum attempt write_own_files(const struct fill *fill);
enum attempt empty_the_ledger(const struct fill *fill);
enum attempt spoil_the_ledger(const struct fill *fill);
void lie_in_the_ledger(const struct fill *fill); /* by the process that holds the slice */
void close_descriptors(const struct fill *fill);

void check_bypass_path(const struct slice *slice, struct board *board);
void check_bypass_copy(const struct slice *slice, struct board *board);
void check_bypass_namespace(const struct slice *slice, struct board *board);
void check_bypass_version(const struct slice *slice, struct board *board);
void check_bypass_symbol_table(const struct slice *slice, struct board *board);
void check_bypass_no_preload(const struct slice *slice, struct board *board);
void check_bypass_other_preload(const struct slice *slice, struct board *board);
void check_bypass_own_limits(const struct slice *slice, struct board *board);
void check_bypass_setuid(const struct slice *slice, struct board *board);
void check_bypass_other_libcuda(const struct slice *slice, struct board *board);
void check_bypass_more_devices(const struct slice *slice, struct board *board);
void check_bypass_own_files(const struct slice *slice, struct board *board);
void check_bypass_descriptors(const struct slice *slice, struct board *board);
void check_bypass_ledger_emptied(const struct slice *slice, struct board *board);
void check_bypass_ledger_spoiled(const struct slice *slice, struct board *board);
void check_bypass_ledger_lie(const struct slice *slice, struct board *board);

#endif
