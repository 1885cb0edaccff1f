/* SPDX-License-Identifier: Apache-2.0 */
/* The bypasses of docs/threat-model.md, each tried by a process while another one has filled the slice. */
#ifndef BYPASS_H
#define BYPASS_H

#include "probe.h"

/* More than what contexts differ by from each other. */
#define BEYOND (64 * MIB)
#define ATTEMPT_S 30

/* CLOSED: the kernel or the runtime gives a tenant nothing of what this way needs. */
enum attempt { REFUSED, GRANTED, UNABLE, CLOSED };
/* Asks for memory beyond the limit, in a process of its own. */
typedef enum attempt (*way_round)(const struct fill *fill);

/* Found functions ask for more than is left of a full slice. */
enum attempt ask_beyond(const struct cuda *cuda, CUdevice device);
/* The same by the functions that every program finds. */
enum attempt ask_honestly(const struct fill *fill);
/* The same in a new program, this file or a copy of it: without what sets a library up, with these variables. */
enum attempt ask_as_program(const char *program, const char *const added[], CUdevice device);
/* The same by a loader that is given this program. */
enum attempt ask_by_loader(const char *loader, const char *program, CUdevice device);
int asked_as_program(const char *device, const char *name); /* what main does there; the process gets that name */
/* In a slice that nothing fills, what is granted bypasses the library only if nothing charges it: ask_beyond looks. */
extern bool slice_is_empty;
/* For the node's watcher to see what was got; ATTEMPT_S is not reached. */
void hold_what_was_got(void);
/* Drops the capabilities that the threat model says a tenant has not. */
void become_the_tenant(void);
/* Copies a file; false: it cannot be. */
bool copy_file(const char *from, const char *to, int mode);
/* A name for a file of ours in a folder that can be written; NULL: there is none. */
const char *scratch_file(const char *name);

/* bypass_load.c */
enum attempt by_path(const struct fill *fill);
enum attempt by_copy(const struct fill *fill);
enum attempt by_renamed(const struct fill *fill);
enum attempt by_namespace(const struct fill *fill);
enum attempt by_symbol_table(const struct fill *fill);
enum attempt by_own_loader(const struct fill *fill);
enum attempt without_leader(const struct fill *fill);
/* The driver's own functions; false: they were not found. Not init's answer: that is the caller's to ask. */
bool driver_by_symbol_table(struct cuda *cuda);

/* bypass_program.c */
enum attempt without_preload(const struct fill *fill);
enum attempt with_other_preload(const struct fill *fill);
enum attempt with_own_limits(const struct fill *fill);
enum attempt with_setuid(const struct fill *fill);
enum attempt with_other_libcuda(const struct fill *fill);
enum attempt with_more_devices(const struct fill *fill);

/* bypass_forged.c */
enum attempt move_own_folders(const struct fill *fill);
enum attempt cover_the_limits(const struct fill *fill);
enum attempt cover_the_preload(const struct fill *fill);

/* bypass_files.c */
enum attempt write_own_files(const struct fill *fill);
enum attempt empty_the_ledger(const struct fill *fill);
enum attempt spoil_the_ledger(const struct fill *fill);
enum attempt remove_the_ledger(const struct fill *fill);
enum attempt grow_the_ledger(const struct fill *fill);
enum attempt boast_in_the_ledger(const struct fill *fill);
void lie_in_the_ledger(const struct fill *fill); /* by the process that holds the slice */
void close_descriptors(const struct fill *fill);

/*
 * Every way: its check's name, what is tried (NULL: an honest program asks), what the holder of the slice does when it has
 * all (NULL: nothing), and what it means when the attempt is granted. The last six spoil the ledger, and come last.
 */
#define BYPASSES(WAY) \
    WAY(path, "bypass-path", by_path, NULL, VIOLATED) \
    WAY(copy, "bypass-copy", by_copy, NULL, VIOLATED) \
    WAY(renamed, "bypass-renamed", by_renamed, NULL, VIOLATED) \
    WAY(namespace, "bypass-namespace", by_namespace, NULL, OPEN) \
    WAY(symbol_table, "bypass-symbol-table", by_symbol_table, NULL, OPEN) \
    WAY(own_loader, "bypass-own-loader", by_own_loader, NULL, OPEN) \
    WAY(leader, "bypass-leader", without_leader, NULL, OPEN) \
    WAY(covered, "bypass-covered", cover_the_limits, NULL, OPEN) \
    WAY(covered_preload, "bypass-covered-preload", cover_the_preload, NULL, OPEN) \
    WAY(folder, "bypass-folder", move_own_folders, NULL, VIOLATED) \
    WAY(no_preload, "bypass-no-preload", without_preload, NULL, VIOLATED) \
    WAY(other_preload, "bypass-other-preload", with_other_preload, NULL, VIOLATED) \
    WAY(own_limits, "bypass-own-limits", with_own_limits, NULL, VIOLATED) \
    WAY(setuid, "bypass-setuid", with_setuid, NULL, VIOLATED) \
    WAY(other_libcuda, "bypass-other-libcuda", with_other_libcuda, NULL, VIOLATED) \
    WAY(more_devices, "bypass-more-devices", with_more_devices, NULL, VIOLATED) \
    WAY(own_files, "bypass-own-files", write_own_files, NULL, VIOLATED) \
    WAY(descriptors, "bypass-descriptors", NULL, close_descriptors, VIOLATED) \
    WAY(ledger_removed, "bypass-ledger-removed", remove_the_ledger, NULL, VIOLATED) \
    WAY(ledger_grown, "bypass-ledger-grown", grow_the_ledger, NULL, VIOLATED) \
    WAY(ledger_emptied, "bypass-ledger-emptied", empty_the_ledger, NULL, VIOLATED) \
    WAY(ledger_spoiled, "bypass-ledger-spoiled", spoil_the_ledger, NULL, VIOLATED) \
    WAY(ledger_lie, "bypass-ledger-lie", NULL, lie_in_the_ledger, OPEN) \
    WAY(ledger_boast, "bypass-ledger-boast", boast_in_the_ledger, NULL, OPEN)

#define BYPASS_CHECK(way, name, attempt, holder, if_granted) \
    void check_bypass_##way(const struct slice *slice, struct board *board);
BYPASSES(BYPASS_CHECK)

/* bypass_kept.c: two processes of the slice, and memory that outlives its release */
void check_bypass_by_ipc(const struct slice *slice, struct board *board);
void check_bypass_by_handle(const struct slice *slice, struct board *board);
void check_bypass_by_pool(const struct slice *slice, struct board *board);
void check_bypass_by_array(const struct slice *slice, struct board *board);

/* bypass_together.c */

/* Whether a check is a bypass that may be open: only such are tried together. */
bool may_be_open(const char *name);
/*
 * Tries bypasses at once, in a slice that is empty otherwise, and holds what they get: for the node's watcher to name, so each
 * process has the name of its check after `bypass-`, cut to 15 bytes. Open is what nothing charges. On the first GPU of the slice.
 */
#define MOST_TOGETHER 8
void go_together(const struct slice *slice, struct board *board, const char *const names[], int count,
                 struct result results[]);

#endif
