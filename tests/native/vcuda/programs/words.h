/* SPDX-License-Identifier: Apache-2.0 */
#ifndef WORDS_H
#define WORDS_H

#include "routes.h"

int graph_word(const struct api *cu, unsigned long long *reg, const char *verb, unsigned long long a, unsigned long long b,
               unsigned long long c, unsigned long long d);
int code_word(const struct api *cu, unsigned long long *reg, const char *verb, unsigned long long a, unsigned long long b,
              unsigned long long c);
int bind_word(const struct api *cu, unsigned long long *reg, const char *verb, unsigned long long a, unsigned long long b,
              unsigned long long c, unsigned long long d);
int call_word(unsigned long long *reg, const char *verb, char *text);

#endif
