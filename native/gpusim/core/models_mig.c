/* SPDX-License-Identifier: Apache-2.0 */
/*
 * MIG profiles of the GPU models with MIG, as `nvidia-smi mig -lgip` and `-lgipp` list them: names, ids, counts,
 * memory, engines, placements.
 *
 * A row is one profile. Each of these models has seven profiles. Their ids, NVML profile numbers and placements (memory
 * slices 0 to 7) are the same on all models and only the sizes differ, so a macro writes them. nvml_profile is a value
 * of NVML_GPU_INSTANCE_PROFILE_*: 0 is 1_SLICE, 1 is 2_SLICE, 2 is 3_SLICE, 3 is 4_SLICE, 4 is 7_SLICE, 7 is
 * 1_SLICE_REV1 (+me), 9 is 1_SLICE_REV2 (double memory).
 */
#include "models_mig.h"

#define ENGINES(ce, dec, jpeg, ofa) ce, dec, 0, jpeg, ofa
#define EACH_SLICE 7, {{0, 1}, {1, 1}, {2, 1}, {3, 1}, {4, 1}, {5, 1}, {6, 1}}
#define PAIRS_4 4, {{0, 2}, {2, 2}, {4, 2}, {6, 2}}
#define PAIRS_3 3, {{0, 2}, {2, 2}, {4, 2}}
#define HALVES 2, {{0, 4}, {4, 4}}
#define FIRST_HALF 1, {{0, 4}}
#define WHOLE 1, {{0, 8}}

/* columns: name, profile id, NVML's profile number, compute slices, maximum number of instances on a GPU, SMs, MiB of
 * memory, engines, allowed placements */
const struct sim_mig_profile sim_mig_a100_40[SIM_MIG_PROFILES] = {
    {"1g.5gb", 19, 0, 1, 7, 14, 4864, ENGINES(1, 0, 0, 0), EACH_SLICE},
    {"1g.5gb+me", 20, 7, 1, 1, 14, 4864, ENGINES(1, 1, 1, 1), EACH_SLICE},
    {"1g.10gb", 15, 9, 1, 4, 14, 9984, ENGINES(1, 1, 0, 0), PAIRS_4},
    {"2g.10gb", 14, 1, 2, 3, 28, 9984, ENGINES(2, 1, 0, 0), PAIRS_3},
    {"3g.20gb", 9, 2, 3, 2, 42, 20096, ENGINES(3, 2, 0, 0), HALVES},
    {"4g.20gb", 5, 3, 4, 1, 56, 20096, ENGINES(4, 2, 0, 0), FIRST_HALF},
    {"7g.40gb", 0, 4, 7, 1, 98, 40448, ENGINES(7, 5, 1, 1), WHOLE},
};

const struct sim_mig_profile sim_mig_a100_80[SIM_MIG_PROFILES] = {
    {"1g.10gb", 19, 0, 1, 7, 14, 9728, ENGINES(1, 0, 0, 0), EACH_SLICE},
    {"1g.10gb+me", 20, 7, 1, 1, 14, 9728, ENGINES(1, 1, 1, 1), EACH_SLICE},
    {"1g.20gb", 15, 9, 1, 4, 14, 19968, ENGINES(1, 1, 0, 0), PAIRS_4},
    {"2g.20gb", 14, 1, 2, 3, 28, 19968, ENGINES(2, 1, 0, 0), PAIRS_3},
    {"3g.40gb", 9, 2, 3, 2, 42, 40192, ENGINES(3, 2, 0, 0), HALVES},
    {"4g.40gb", 5, 3, 4, 1, 56, 40192, ENGINES(4, 2, 0, 0), FIRST_HALF},
    {"7g.80gb", 0, 4, 7, 1, 98, 81152, ENGINES(7, 5, 1, 1), WHOLE},
};

const struct sim_mig_profile sim_mig_h100_80[SIM_MIG_PROFILES] = {
    {"1g.10gb", 19, 0, 1, 7, 16, 9856, ENGINES(1, 1, 1, 0), EACH_SLICE},
    {"1g.10gb+me", 20, 7, 1, 1, 16, 9856, ENGINES(1, 1, 1, 1), EACH_SLICE},
    {"1g.20gb", 15, 9, 1, 4, 26, 19968, ENGINES(1, 1, 1, 0), PAIRS_4},
    {"2g.20gb", 14, 1, 2, 3, 32, 19968, ENGINES(2, 2, 2, 0), PAIRS_3},
    {"3g.40gb", 9, 2, 3, 2, 60, 40192, ENGINES(3, 3, 3, 0), HALVES},
    {"4g.40gb", 5, 3, 4, 1, 64, 40192, ENGINES(4, 4, 4, 0), FIRST_HALF},
    {"7g.80gb", 0, 4, 7, 1, 132, 80896, ENGINES(8, 7, 7, 1), WHOLE},
};

const struct sim_mig_profile sim_mig_h200[SIM_MIG_PROFILES] = {
    {"1g.18gb", 19, 0, 1, 7, 16, 16384, ENGINES(1, 1, 1, 0), EACH_SLICE},
    {"1g.18gb+me", 20, 7, 1, 1, 16, 16384, ENGINES(1, 1, 1, 1), EACH_SLICE},
    {"1g.35gb", 15, 9, 1, 4, 26, 33280, ENGINES(1, 1, 1, 0), PAIRS_4},
    {"2g.35gb", 14, 1, 2, 3, 32, 33280, ENGINES(2, 2, 2, 0), PAIRS_3},
    {"3g.71gb", 9, 2, 3, 2, 60, 71424, ENGINES(3, 3, 3, 0), HALVES},
    {"4g.71gb", 5, 3, 4, 1, 64, 71424, ENGINES(4, 4, 4, 0), FIRST_HALF},
    {"7g.141gb", 0, 4, 7, 1, 132, 142976, ENGINES(8, 7, 7, 1), WHOLE},
};
