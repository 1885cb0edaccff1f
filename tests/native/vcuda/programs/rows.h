/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ROWS_H
#define ROWS_H

/* Returns the address of a function by its link-time symbol. Returns NULL if hooks.def, the list of the library's
 * hooks, does not contain the function or the driver lacks it. */
void *row_linked(const char *symbol);
/* Returns the address that cuGetProcAddress gives for the symbol's name, version and stream flag. */
void *row_by_address(const char *symbol);

#endif
