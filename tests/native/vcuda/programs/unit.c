/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tests the parts of the library that need no driver, compiled with sanitizers. Usage: unit WHAT. The ledger is the
 * file in which a container's processes charge the GPU memory that they use.
 *   parse   runs the parser of limits files on mutated files; it must always return, and never read past its input
 *   blocks  compares the block map, in which the library records allocations (blocks), with a plain array
 *   ledger  processes with several threads charge and uncharge memory, and some are killed; together they must never
 *           have more than the limit
 */
#include "account/blocks.h"
#include "check.h"
#include "limits/limits_file.h"

#include <assert.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

/* Replacements for functions of the library's file limits.c. */
static const char *ledger_path;
const char *limits_ledger_path(unsigned share)
{
    (void)share;
    return ledger_path;
}
bool limits_ledger_create(void)
{
    return true;
}
bool limits_of_an_allocation(void)
{
    return false;
}
unsigned limits_shares(void)
{
    return 1;
}

uint64_t limits_share_memory(unsigned share, const char *uuid, bool *named)
{
    (void)share, (void)uuid;
    *named = false;
    return 0;
}

bool limits_same_allocation(unsigned share, const char allocation[VGPU_ALLOCATION_SIZE])
{
    (void)share;
    (void)allocation;
    return true;
}
bool limits_ledger_is_own(void)
{
    return false;
}
int limits_devices(char uuids[VGPU_MAX_DEVICES][VGPU_UUID_SIZE])
{
    (void)uuids;
    return 0;
}
bool uuid_same(const char *left, const char *right)
{
    return strcmp(left, right) == 0;
}

static uint64_t seed = 88172645463325252ull;
static uint64_t random_number(void)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    return seed ^= seed << 17;
}

static void valid_limits(unsigned char bytes[VGPU_LIMITS_FILE_SIZE])
{
    struct vgpu_limits limits = {.version = 1, .min_reader = 1, .size = VGPU_LIMITS_FILE_SIZE, .device_count = 2,
                                 .device_offset = offsetof(struct vgpu_limits, devices),
                                 .device_size = sizeof(struct vgpu_limits_device)};
    memcpy(limits.magic, VGPU_LIMITS_MAGIC, sizeof limits.magic);
    strcpy(limits.devices[0].uuid, "GPU-0");
    strcpy(limits.devices[1].uuid, "GPU-1");
    memset(bytes, 0, VGPU_LIMITS_FILE_SIZE);
    limits.crc32 = 0;
    memcpy(bytes, &limits, sizeof limits);
    limits.crc32 = limits_crc(bytes, VGPU_LIMITS_FILE_SIZE);
    memcpy(bytes, &limits, sizeof limits);
}

static void parse(void)
{
    unsigned char good[VGPU_LIMITS_FILE_SIZE];
    struct vgpu_limits out;
    char reason[200];
    unsigned accepted = 0;
    valid_limits(good);
    CHECK(limits_parse(good, sizeof good, &out, reason, sizeof reason));
    for (unsigned round = 0; round < 60000; round++) {
        size_t length = round % 3 ? sizeof good : random_number() % (sizeof good + 1);
        /* The copy has exactly the input's size, so that the sanitizer reports a read past the end. */
        unsigned char *copy = malloc(length ? length : 1);
        memcpy(copy, good, length);
        for (unsigned changes = 1 + random_number() % 4; length && changes; changes--) {
            /* Changes hit mostly the header, and often set four bytes to an extreme value. */
            size_t at = random_number() % (random_number() % 4 ? (length < 128 ? length : 128) : length);
            copy[at] = (unsigned char)random_number();
            if (random_number() % 2 && at + 4 <= length)
                memset(copy + at, random_number() % 2 ? 0xff : 0, 4);
        }
        /* Most files get a correct checksum, as a deliberately forged file would have. */
        if (random_number() % 4 && length >= offsetof(struct vgpu_limits, flags)) {
            uint32_t size, crc;
            memcpy(&size, copy + offsetof(struct vgpu_limits, size), 4);
            if (size <= length) {
                crc = limits_crc(copy, size);
                memcpy(copy + offsetof(struct vgpu_limits, crc32), &crc, 4);
            }
        }
        bool ok = limits_parse(copy, length, &out, reason, sizeof reason);
        accepted += ok;
        if (ok)
            CHECK(out.device_count <= VGPU_MAX_DEVICES && out.core_policy <= VGPU_CORE_DISABLE && !(out.sequence & 1));
        else
            CHECK(reason[0] != 0);
        free(copy);
    }
    CHECK(accepted > 100); /* Enough mutated files were valid, so the mutations reach the code behind the checksum. */
}

#define KEYS 4096
static bool odd_owner(const struct block *block, void *data)
{
    *(uint64_t *)data += block->bytes;
    return block->owner & 1;
}

/* Adds a block as the hooks do: sometimes they try the fast path first. */
static bool put(const struct block *block)
{
    return (random_number() % 2 && block_put_now(&vgpu_memory, block)) || block_put(&vgpu_memory, block);
}

static bool take(uint64_t key, struct block *block)
{
    return (random_number() % 2 && block_take_now(&vgpu_memory, key, block)) || block_take(&vgpu_memory, key, block);
}

static void blocks(void)
{
    /* The index is the block's number and its owner; the value is the block's size in bytes, 0 if absent. */
    static uint64_t model[KEYS];
    for (unsigned round = 0; round < 400000; round++) {
        uint64_t index = random_number() % KEYS, key = index * 4096 + 1;
        struct block block;
        if (random_number() % 2) {
            block = (struct block){.key = key, .bytes = 1 + random_number() % 1000, .owner = index, .kind = 1};
            CHECK(put(&block));
            model[index] = block.bytes;
        } else {
            bool there = random_number() % 2 ? take(key, &block) : block_get(&vgpu_memory, key, &block);
            CHECK(there == (model[index] != 0));
            CHECK(!there || (block.bytes == model[index] && block.owner == index));
            if (there && !block_get(&vgpu_memory, key, &block))
                model[index] = 0;
        }
    }
    uint64_t seen = 0, expected = 0;
    block_sweep(&vgpu_memory, odd_owner, &seen);
    for (unsigned i = 0; i < KEYS; i++)
        expected += model[i];
    /* The sweep over all blocks may visit a block twice if the block moved to a later entry, but it misses none. */
    CHECK(seen >= expected);
    for (uint64_t i = 0; i < KEYS; i++) {
        struct block block;
        CHECK(block_get(&vgpu_memory, i * 4096 + 1, &block) == (model[i] && !(i & 1)));
    }
}

#define LIMIT 1000000ull
#define MEMBERS 4
static _Atomic uint64_t *held; /* Bytes that each member (process) really uses; in shared memory. */

static unsigned killed; /* Number of members that are killed: 1, which is the first member, or 0. */

static void *churn(void *data)
{
    unsigned member = *(unsigned *)data;
    int device = ledger_device("GPU-0");
    CHECK(device >= 0);
    for (unsigned i = 0; i < 20000; i++) {
        uint64_t bytes = LIMIT / 3 + i % 100;
        if (ledger_charge(device, ACCOUNT_USED, bytes, LIMIT) != CHARGE_OK)
            continue;
        uint64_t sum = 0;
        atomic_fetch_add(&held[member], bytes);
        /* When a member is killed, the ledger releases the member's bytes, but the entry in `held` keeps them. So the
         * other members skip this entry. */
        for (unsigned m = member == 0 ? 0 : killed; m < MEMBERS; m++)
            sum += atomic_load(&held[m]);
        CHECK(sum <= LIMIT);
        atomic_fetch_sub(&held[member], bytes);
        ledger_uncharge(device, ACCOUNT_USED, bytes);
    }
    return NULL;
}

static void ledger(bool kills)
{
    uint64_t total;
    killed = kills;
    held = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (unsigned round = 0; round < (kills ? 20u : 2u); round++) {
        pid_t members[MEMBERS];
        for (unsigned m = 0; m < MEMBERS; m++) {
            atomic_store(&held[m], 0);
            members[m] = fork();
            if (members[m] == 0) {
                pthread_t threads[2];
                CHECK(ledger_join());
                for (int t = 0; t < 2; t++)
                    pthread_create(&threads[t], NULL, churn, &m);
                for (int t = 0; t < 2; t++)
                    pthread_join(threads[t], NULL);
                CHECK(ledger_own(ledger_device("GPU-0"), ACCOUNT_USED) == 0);
                exit(0);
            }
        }
        if (kills) {
            usleep((useconds_t)(random_number() % 20000));
            kill(members[0], SIGKILL);
            waitpid(members[0], NULL, 0);
        }
        for (unsigned m = kills; m < MEMBERS; m++) {
            int status;
            waitpid(members[m], &status, 0);
            CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        }
        CHECK(ledger_total("GPU-0", &total) && total == 0);
    }
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "parse") == 0) {
        parse();
    } else if (argc == 2 && strcmp(argv[1], "blocks") == 0) {
        blocks();
    } else if (argc == 3 && strcmp(argv[1], "ledger") == 0) {
        ledger_path = argv[2];
        ledger(false);
    } else if (argc == 3 && strcmp(argv[1], "ledger-kills") == 0) {
        ledger_path = argv[2];
        ledger(true);
    } else {
        return 2;
    }
    puts("ok");
    return 0;
}
