/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ROWS_H
#define ROWS_H

/* Returns a function of hooks.def by its link-time symbol, or NULL if it is not hooked or the driver lacks it. */
void *row_linked(const char *symbol);
/* Returns the function by cuGetProcAddress, called with the name, version and stream flag of the symbol. */
void *row_by_address(const char *symbol);

#endif
