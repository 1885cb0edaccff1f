/* SPDX-License-Identifier: Apache-2.0 */
/* Reads JSON text in place. A value is a pointer into the text, or NULL if the text is not JSON or has no such
 * value. */
#ifndef VGPU_HOOK_JSON_H
#define VGPU_HOOK_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

/* Reads a whole file or descriptor, NUL-terminated, at most `most` bytes. Returns NULL and sets errno on failure.
 * The caller frees the text. */
char *json_read(int descriptor, size_t most);
/* Returns true if the whole text is one JSON value. */
bool json_whole(const char *text);
/* Returns the value of the member with this name; of several members with the name, the last. */
const char *json_member(const char *object, const char *name);
/* Returns the array's first element; NULL also for an empty array. */
const char *json_first(const char *array);
const char *json_next(const char *element);
/* Returns false if the value is no string, does not fit, or contains a NUL. */
bool json_string(const char *value, char *out, size_t size);
/* Reads a non-negative integer. Returns false for any other value. */
bool json_number(const char *value, unsigned long long *out);
/* Prints the text as a quoted JSON string. */
void json_print(FILE *file, const char *text);

#endif
