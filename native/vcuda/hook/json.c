/* SPDX-License-Identifier: Apache-2.0 */
/* Parses the JSON that a container runtime writes: the container's state and configuration, a few hundred kilobytes at
 * most. */
#include "json.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DEEPEST 64

char *json_read(int descriptor, size_t most)
{
    size_t length = 0, room = 8192;
    char *text = malloc(room);
    while (text) {
        ssize_t got = read(descriptor, text + length, room - length - 1);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0) {
            text[length] = 0;
            if (got == 0 && strlen(text) == length)
                return text;
            errno = got ? errno : EINVAL;
            break;
        }
        length += (size_t)got;
        if (length > most) {
            errno = EFBIG;
            break;
        }
        if (room - length < 4096) {
            char *more = realloc(text, room *= 2);
            if (!more)
                break;
            text = more;
        }
    }
    free(text);
    return NULL;
}

static const char *space(const char *at)
{
    return at ? at + strspn(at, " \t\r\n") : NULL;
}

static const char *skip_string(const char *at)
{
    if (*at++ != '"')
        return NULL;
    for (; *at && *at != '"'; at++) {
        if ((unsigned char)*at < 0x20 || (*at == '\\' && !*++at))
            return NULL;
    }
    return *at ? at + 1 : NULL;
}

static const char *skip(const char *at, int depth);

/* Skips an object (whose members have names) or an array. */
static const char *skip_list(const char *at, char end, int depth)
{
    at = space(at + 1);
    if (*at == end)
        return at + 1;
    for (;;) {
        if (end == '}') {
            at = space(skip_string(at));
            if (!at || *at++ != ':')
                return NULL;
            at = space(at);
        }
        at = space(skip(at, depth + 1));
        if (!at)
            return NULL;
        if (*at == end)
            return at + 1;
        if (*at++ != ',')
            return NULL;
        at = space(at);
    }
}

static const char *skip(const char *at, int depth)
{
    if (depth > DEEPEST)
        return NULL;
    if (*at == '"')
        return skip_string(at);
    if (*at == '{' || *at == '[')
        return skip_list(at, *at == '{' ? '}' : ']', depth);
    static const char *const words[] = {"true", "false", "null"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strncmp(at, words[i], strlen(words[i])) == 0)
            return at + strlen(words[i]);
    size_t digits = strspn(at, "+-.0123456789eE");
    return digits ? at + digits : NULL;
}

bool json_whole(const char *text)
{
    const char *end = text ? space(skip(space(text), 0)) : NULL;
    return end && !*end;
}

const char *json_member(const char *object, const char *name)
{
    const char *found = NULL, *at = space(object);
    char one[64];
    if (!at || *at != '{')
        return NULL;
    at = space(at + 1);
    while (at && *at == '"') {
        bool same = json_string(at, one, sizeof one) && strcmp(one, name) == 0;
        at = space(skip_string(at));
        if (!at || *at != ':')
            return NULL;
        at = space(at + 1);
        if (same)
            found = at;
        at = space(skip(at, 1));
        if (at && *at == ',')
            at = space(at + 1);
    }
    return found;
}

const char *json_first(const char *array)
{
    const char *at = space(array);
    if (!at || *at != '[')
        return NULL;
    at = space(at + 1);
    return *at == ']' ? NULL : at;
}

const char *json_next(const char *element)
{
    const char *at = element ? space(skip(element, 1)) : NULL;
    return at && *at == ',' ? space(at + 1) : NULL;
}

static int hexadecimal(const char *at)
{
    int value = 0;
    for (int i = 0; i < 4; i++) {
        const char *digits = "0123456789abcdef";
        const char *digit = at[i] ? strchr(digits, at[i] >= 'A' && at[i] <= 'F' ? at[i] + 32 : at[i]) : NULL;
        if (!digit)
            return -1;
        value = value * 16 + (int)(digit - digits);
    }
    return value;
}

/* Writes a code point as UTF-8. A surrogate is encoded like any other code point, because no path of the node contains
 * one. */
static size_t put(char *out, int code)
{
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    size_t more = code < 0x800 ? 1 : 2;
    out[0] = (char)((more == 1 ? 0xc0 : 0xe0) | (code >> (6 * more)));
    for (size_t i = 1; i <= more; i++)
        out[i] = (char)(0x80 | ((code >> (6 * (more - i))) & 0x3f));
    return more + 1;
}

bool json_string(const char *value, char *out, size_t size)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    size_t length = 0;
    const char *at = value;
    if (!at || *at++ != '"')
        return false;
    while (*at != '"') {
        if (!*at || length + 4 > size)
            return false;
        if (*at != '\\') {
            out[length++] = *at++;
            continue;
        }
        at++;
        const char *known = *at ? strchr(from, *at) : NULL;
        int code = *at == 'u' ? hexadecimal(at + 1) : known ? to[known - from] : -1;
        if (code <= 0)
            return false;
        length += put(out + length, code);
        at += *at == 'u' ? 5 : 1;
    }
    out[length] = 0;
    return true;
}

bool json_number(const char *value, unsigned long long *out)
{
    char *end;
    if (!value || *value < '0' || *value > '9')
        return false;
    errno = 0;
    *out = strtoull(value, &end, 10);
    return errno == 0 && !strchr(".eE+-0123456789", *end ? *end : '.');
}

void json_print(FILE *file, const char *text)
{
    fputc('"', file);
    for (; *text; text++) {
        if (*text == '"' || *text == '\\')
            fprintf(file, "\\%c", *text);
        else if ((unsigned char)*text < 0x20)
            fprintf(file, "\\u%04x", (unsigned)*text);
        else
            fputc(*text, file);
    }
    fputc('"', file);
}
