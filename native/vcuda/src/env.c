/* SPDX-License-Identifier: Apache-2.0 */
/* Values of environment variables. A parser answers false for what it does not understand in full. */
#include "vgpu.h"

#include <string.h>
#include <strings.h>

bool env_bytes(const char *text, uint64_t *bytes)
{
    uint64_t value = 0;
    const char *c = text;
    if (*c < '0' || *c > '9')
        return false;
    for (; *c >= '0' && *c <= '9'; c++) {
        if (value > (UINT64_MAX - 9) / 10)
            return false;
        value = value * 10 + (uint64_t)(*c - '0');
    }
    unsigned shift = 0;
    switch (*c) {
    case 'k': case 'K': shift = 10; c++; break;
    case 'm': case 'M': shift = 20; c++; break;
    case 'g': case 'G': shift = 30; c++; break;
    default: break;
    }
    /* 0 would be "no limit" to some and "nothing" to others: no limit can be meant by it here. */
    if (*c || value == 0 || value > UINT64_MAX >> shift)
        return false;
    *bytes = value << shift;
    return true;
}

bool env_flag(const char *text, bool *value)
{
    static const char *const yes[] = {"true", "1", "yes", "on"}, *const no[] = {"false", "0", "no", "off", ""};
    for (size_t i = 0; i < sizeof yes / sizeof *yes; i++)
        if (strcasecmp(text, yes[i]) == 0) {
            *value = true;
            return true;
        }
    for (size_t i = 0; i < sizeof no / sizeof *no; i++)
        if (strcasecmp(text, no[i]) == 0) {
            *value = false;
            return true;
        }
    return false;
}

bool env_number(const char *text, int low, int high, int *value)
{
    int number = 0;
    if (!*text)
        return false;
    for (const char *c = text; *c; c++) {
        if (*c < '0' || *c > '9' || number > high)
            return false;
        number = number * 10 + (*c - '0');
    }
    if (number < low || number > high)
        return false;
    *value = number;
    return true;
}
