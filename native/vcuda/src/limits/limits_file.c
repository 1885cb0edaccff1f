/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the limits file: checks that it is valid, and copies it consistently even while the node is writing it. */
#include "limits_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define HEADER offsetof(struct vgpu_limits, devices)

uint32_t limits_crc(const unsigned char *data, size_t size)
{
    static const uint32_t nibble[16] = {
        0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4, 0x4db26158, 0x5005713c,
        0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c, 0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c,
    };
    uint32_t crc = ~0u;
    for (size_t i = 0; i < size; i++) {
        bool skipped = i >= offsetof(struct vgpu_limits, sequence) && i < offsetof(struct vgpu_limits, flags);
        crc ^= skipped ? 0 : data[i];
        crc = (crc >> 4) ^ nibble[crc & 15];
        crc = (crc >> 4) ^ nibble[crc & 15];
    }
    return ~crc;
}

static bool why(char *reason, size_t size, const char *what, unsigned long long found, unsigned long long expected)
{
    snprintf(reason, size, "%s is %llu, expected %llu", what, found, expected);
    return false;
}

/* Returns how many bytes of an entry of this size belong to complete fields. A truncated field counts as missing. */
static size_t whole_fields(size_t stride)
{
    static const size_t ends[] = {sizeof(struct vgpu_limits_device), offsetof(struct vgpu_limits_device, card_bytes),
                                  offsetof(struct vgpu_limits_device, flags)};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        if (stride >= ends[i])
            return ends[i];
    return offsetof(struct vgpu_limits_device, sm_percent);
}

static bool is_name(const char uuid[VGPU_UUID_SIZE])
{
    const char *end = memchr(uuid, 0, VGPU_UUID_SIZE);
    for (const char *c = uuid; end && c < end; c++)
        if ((unsigned char)*c > 127)
            return false;
    return end && end != uuid && uuid[VGPU_UUID_SIZE - 1] == 0;
}

bool limits_parse(const unsigned char *data, size_t length, struct vgpu_limits *out, char *reason, size_t room)
{
    struct vgpu_limits header;
    memset(out, 0, sizeof *out);
    if (length < HEADER)
        return why(reason, room, "its length", length, VGPU_LIMITS_FILE_SIZE);
    memcpy(&header, data, HEADER);
    if (memcmp(header.magic, VGPU_LIMITS_MAGIC, sizeof header.magic) != 0) {
        snprintf(reason, room, "it does not begin with " VGPU_LIMITS_MAGIC);
        return false;
    }
    if (header.min_reader > VGPU_LIMITS_VERSION || header.version == 0) {
        snprintf(reason, room, "its version %u needs a reader of version %u, this library is version %u",
                 header.version, header.min_reader, VGPU_LIMITS_VERSION);
        return false;
    }
    if (header.size < HEADER || header.size > length)
        return why(reason, room, "its size field", header.size, length);
    if (header.sequence & 1) {
        snprintf(reason, room, "it is torn: its sequence %u is odd", header.sequence);
        return false;
    }
    uint32_t crc = limits_crc(data, header.size);
    if (crc != header.crc32) {
        snprintf(reason, room, "it is torn: its crc32 is %#x, expected %#x", header.crc32, crc);
        return false;
    }
    if (header.device_count > VGPU_MAX_DEVICES)
        return why(reason, room, "its device count", header.device_count, VGPU_MAX_DEVICES);
    if (header.core_policy > VGPU_CORE_DISABLE)
        return why(reason, room, "its core policy", header.core_policy, VGPU_CORE_DISABLE);
    size_t stride = header.device_size;
    if (header.device_count && (stride < offsetof(struct vgpu_limits_device, sm_percent) || stride > header.size))
        return why(reason, room, "its device size", stride, sizeof(struct vgpu_limits_device));
    if ((uint64_t)header.device_offset + (uint64_t)header.device_count * stride > header.size)
        return why(reason, room, "the end of its devices", header.device_offset + header.device_count * stride, header.size);
    memcpy(out, &header, HEADER);
    for (uint32_t i = 0; i < header.device_count; i++) {
        memcpy(&out->devices[i], data + header.device_offset + i * stride, whole_fields(stride));
        if (!is_name(out->devices[i].uuid)) {
            snprintf(reason, room, "the UUID of its device %u is not a name", i);
            return false;
        }
        if (out->devices[i].sm_percent > 100)
            return why(reason, room, "the SM percent of a device", out->devices[i].sm_percent, 100);
    }
    return true;
}

bool limits_map(const char *path, struct limits_file *file, char *reason, size_t room)
{
    int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    if (descriptor >= 0)
        return limits_map_open(descriptor, file, reason, room);
    file->missing = errno == ENOENT || errno == ENOTDIR;
    snprintf(reason, room, "it cannot be opened: %s", strerror(errno));
    return false;
}

bool limits_map_open(int descriptor, struct limits_file *file, char *reason, size_t room)
{
    struct stat status;
    file->missing = false;
    /* Uses the system call, because on new systems libc's fstat would make the library require GLIBC_2.33. */
    if (syscall(SYS_fstat, descriptor, &status) != 0) {
        snprintf(reason, room, "its length cannot be read: %s", strerror(errno));
        close(descriptor);
        return false;
    }
    if (!S_ISREG(status.st_mode) || status.st_size < (off_t)HEADER || status.st_size > (off_t)(16 << 20)) {
        why(reason, room, "its length", (unsigned long long)status.st_size, VGPU_LIMITS_FILE_SIZE);
        close(descriptor);
        return false;
    }
    void *map = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_SHARED, descriptor, 0);
    close(descriptor);
    if (map == MAP_FAILED) {
        snprintf(reason, room, "it cannot be mapped: %s", strerror(errno));
        return false;
    }
    file->data = map;
    file->length = (size_t)status.st_size;
    return true;
}

uint32_t limits_sequence(const struct limits_file *file)
{
    const struct vgpu_limits *limits = (const struct vgpu_limits *)file->data;
    return __atomic_load_n(&limits->sequence, __ATOMIC_ACQUIRE);
}

/* Copies the bytes. The caller reads the sequence number before and after the copy. Acquire loads ensure that the
 * second of these reads comes last. No memory fence is used, because the thread sanitizer does not support fences. The
 * mapping is page-aligned, so 8-byte loads are aligned. */
static void load(unsigned char *to, const unsigned char *from, size_t length)
{
    size_t i = 0;
    for (; i + 8 <= length; i += 8) {
        uint64_t word = __atomic_load_n((const uint64_t *)(const void *)(from + i), __ATOMIC_ACQUIRE);
        memcpy(to + i, &word, sizeof word);
    }
    for (; i < length; i++)
        to[i] = __atomic_load_n(from + i, __ATOMIC_ACQUIRE);
}

bool limits_copy(const struct limits_file *file, unsigned patience_ms, struct vgpu_limits *out, char *reason, size_t room)
{
    unsigned char copy[VGPU_LIMITS_FILE_SIZE];
    size_t length = file->length < sizeof copy ? file->length : sizeof copy;
    for (unsigned waited = 0;; waited++) {
        uint32_t before = limits_sequence(file);
        if (!(before & 1)) {
            load(copy, file->data, length);
            if (limits_sequence(file) == before && limits_parse(copy, length, out, reason, room))
                return true;
        } else {
            snprintf(reason, room, "it is torn: its sequence %u is odd", before);
        }
        if (waited >= patience_ms)
            return false;
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    }
}
