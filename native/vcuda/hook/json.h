/* SPDX-License-Identifier: Apache-2.0 */
/* Reads JSON text in place: a value is a pointer into the text, NULL where the text is no JSON or has no such value. */
#ifndef VGPU_HOOK_JSON_H
#define VGPU_HOOK_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

/* The whole of a file or descriptor, NUL-terminated, at most `most` bytes; NULL: errno says why. The caller frees it. */
char *json_read(int descriptor, size_t most);
/* The whole text is one value, and nothing follows it. */
bool json_whole(const char *text);
const char *json_member(const char *object, const char *name); /* of two with one name the last */
const char *json_first(const char *array);                     /* NULL also where it is empty */
const char *json_next(const char *element);
/* false: no string, one that does not fit, or one with a NUL inside. */
bool json_string(const char *value, char *out, size_t size);
bool json_number(const char *value, unsigned long long *out); /* whole and not negative */
void json_print(FILE *file, const char *text);                 /* as a string, in quotes */

#endif
