/* SPDX-License-Identifier: Apache-2.0 */
/* Fuzzes the library's parsers of environment variables with arbitrary text. Accepted values must be within the
 * documented ranges. */
#include "limits/env.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t length);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t length)
{
    char *text = malloc(length + 1), kept[64];
    uint64_t bytes = 0;
    bool flag;
    int number = -7;
    if (!text)
        return 0;
    memcpy(text, data, length);
    text[length] = 0;
    if (env_bytes(text, &bytes) && bytes == 0)
        abort();
    env_flag(text, &flag);
    if (env_number(text, 0, 100, &number) && (number < 0 || number > 100))
        abort();
    env_keep_path(text, kept, sizeof kept);
    if (!memchr(kept, 0, sizeof kept))
        abort();
    free(text);
    return 0;
}
