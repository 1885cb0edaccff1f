/* SPDX-License-Identifier: Apache-2.0 */
/* The bypasses of docs/threat-model.md, by which a tenant could exceed the limit of its slice (its part of a GPU's
 * memory). Each is tried by one process while another process has filled the slice. */
#ifndef BYPASS_H
#define BYPASS_H

#include "probe.h"

/* Number of bytes that an attempt requests. Contexts differ in size by less, so a larger context does not pass for a
 * granted request. */
#define BEYOND (64 * MIB)
#define ATTEMPT_S 30

/* UNABLE: the attempt proves nothing. CLOSED: the kernel or the container runtime denies a permission that the bypass
 * needs. */
enum attempt { REFUSED, GRANTED, UNABLE, CLOSED };
/* A bypass attempt: requests memory beyond the limit. It runs in its own process. */
typedef enum attempt (*way_round)(const struct fill *fill);

/* Requests more memory than is left of a full slice, by the functions of `cuda`. */
enum attempt ask_beyond(const struct cuda *cuda, CUdevice device);
/* Makes the same request by the public functions that dlsym finds in libcuda. */
enum attempt ask_honestly(const struct fill *fill);
/* Makes the same request in a new program (the probe or a copy of it), without the variables that load the library and
 * with the variables in `added`. */
enum attempt ask_as_program(const char *program, const char *const added[], CUdevice device);
/* Makes the same request in a program that the given dynamic loader starts. */
enum attempt ask_by_loader(const char *loader, const char *program, CUdevice device);
/* Called by main in the new program, which then makes the request. The process gets the given name. */
int asked_as_program(const char *device, const char *name);
/* slice_is_empty: true if the slice is not filled first. The request then fits into the slice, so a grant alone proves
 * nothing: the attempt is a bypass only if the memory is charged to no process. ask_beyond checks that. */
extern bool slice_is_empty;
/* Waits, for less than ATTEMPT_S, so that the node's watcher can see the granted memory. The watcher compares the
 * memory that the driver shows for each process with the ledger, the container's file of the memory charged to each
 * process. */
void hold_what_was_got(void);
/* Drops the capabilities that a tenant of the threat model does not have. */
void become_the_tenant(void);
/* Copies a file. Returns false if that fails. */
bool copy_file(const char *from, const char *to, int mode);
/* Returns a path for a temporary file in a writable folder, or NULL if there is no such folder. */
const char *scratch_file(const char *name);

/* Defined in bypass_load.c: */
enum attempt by_path(const struct fill *fill);
enum attempt by_copy(const struct fill *fill);
enum attempt by_renamed(const struct fill *fill);
enum attempt by_namespace(const struct fill *fill);
enum attempt by_symbol_table(const struct fill *fill);
enum attempt by_own_loader(const struct fill *fill);
enum attempt without_leader(const struct fill *fill);
/* Finds the driver's own functions. Returns false if they were not found. The caller must call `cuda->init`. */
bool driver_by_symbol_table(struct cuda *cuda);

/* Defined in bypass_program.c: */
enum attempt without_preload(const struct fill *fill);
enum attempt with_other_preload(const struct fill *fill);
enum attempt with_own_limits(const struct fill *fill);
enum attempt with_setuid(const struct fill *fill);
enum attempt with_other_libcuda(const struct fill *fill);
enum attempt with_more_devices(const struct fill *fill);

/* Defined in bypass_forged.c: */
enum attempt move_own_folders(const struct fill *fill);
enum attempt cover_the_limits(const struct fill *fill);
enum attempt cover_the_preload(const struct fill *fill);

/* Defined in bypass_files.c: */
enum attempt write_own_files(const struct fill *fill);
enum attempt empty_the_ledger(const struct fill *fill);
enum attempt spoil_the_ledger(const struct fill *fill);
enum attempt remove_the_ledger(const struct fill *fill);
enum attempt grow_the_ledger(const struct fill *fill);
enum attempt boast_in_the_ledger(const struct fill *fill);
/* lie_in_the_ledger: called by the process that has filled the slice. */
void lie_in_the_ledger(const struct fill *fill);
void close_descriptors(const struct fill *fill);

/*
 * All bypasses. One process fills the slice, and then another one requests more memory. The columns are: a short name;
 * the check's name; the function that tries the bypass (NULL: an ordinary program requests the memory); the function
 * that the first process calls before (NULL: none); the verdict if the memory is granted. The last six bypasses damage
 * the ledger (the file of charged memory), so they run last.
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

/* Defined in bypass_kept.c. They test memory that exists after its release, because a second process of the slice keeps
 * it. */
void check_bypass_by_ipc(const struct slice *slice, struct board *board);
void check_bypass_by_handle(const struct slice *slice, struct board *board);
void check_bypass_by_pool(const struct slice *slice, struct board *board);
void check_bypass_by_array(const struct slice *slice, struct board *board);

/* Defined in bypass_together.c: */

/* Returns true for a check whose bypass the library cannot always prevent. Only such bypasses are tried together. */
bool may_be_open(const char *name);
/*
 * Tries bypasses concurrently in an otherwise empty slice, on its first GPU. The granted memory stays allocated for a
 * while, so that the node's watcher can name the processes. The name of each process is the check's name without
 * `bypass-`, cut to 15 bytes. Memory that is charged to no process is reported as open.
 */
#define MOST_TOGETHER 8
void go_together(const struct slice *slice, struct board *board, const char *const names[], int count,
                 struct result results[]);

#endif
