/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ROWS_H
#define ROWS_H

/* A function of hooks.def; NULL: it is none, or the driver has not got it. */
void *row_linked(const char *symbol);
/* The same by cuGetProcAddress, asked with the name, version and stream flag that stand for that symbol. */
void *row_by_address(const char *symbol);

#endif
