/* SPDX-License-Identifier: Apache-2.0 */
/* The static facts of each GPU model. models.c has the values. */
#ifndef GPUSIM_MODELS_H
#define GPUSIM_MODELS_H

#include <stdbool.h>
#include <stdint.h>

struct sim_mig_placement {
    uint8_t start, size;
};

/* One GPU-instance profile of a model (nvidia-smi mig -lgip). models_mig.c has the values. */
struct sim_mig_profile {
    /* Name as nvidia-smi prints it, without the "MIG ": "1g.5gb", "1g.5gb+me", … */
    const char *name;
    /* Profile id that nvidia-smi shows and its -cgi option takes: 19, 20, 14, 9, 5, 0 or 15. */
    uint32_t id;
    /* NVML_GPU_INSTANCE_PROFILE_*: 0 = 1_SLICE, 1 = 2_SLICE, … */
    uint32_t nvml_profile;
    /* Number of compute slices. */
    uint32_t slices;
    uint32_t max_instances;
    uint32_t sm_count;
    uint32_t memory_mib;
    uint32_t copy_engines, decoders, encoders, jpegs, ofas;
    uint32_t placement_count;
    struct sim_mig_placement placements[8];
};

/* The values are those of NVML_DEVICE_ARCH_*. */
enum sim_arch { SIM_PASCAL = 4, SIM_VOLTA = 5, SIM_TURING = 6, SIM_AMPERE = 7, SIM_ADA = 8, SIM_HOPPER = 9 };

struct sim_model {
    /* Model name in profiles, such as "T4". */
    const char *key;
    /* Model name as NVML and CUDA print it, such as "Tesla T4". */
    const char *name;
    enum sim_arch arch;
    /* Total memory as NVML reports it. */
    uint32_t memory_mib;
    /* Memory that one context takes. */
    uint32_t context_mib;
    uint32_t sm_count, cores_per_sm, threads_per_sm;
    /* Shared memory in bytes. */
    uint32_t shared_per_sm, shared_per_block_optin;
    uint32_t cc_major, cc_minor;
    /* Device << 16 | vendor, as in NVML's pciDeviceId. */
    uint32_t pci_device_id, pci_subsystem_id;
    /* A value of NVML_BRAND_*. */
    uint32_t brand;
    uint32_t power_limit_mw, idle_power_mw;
    /* Maximum clocks. */
    uint32_t clock_sm_mhz, clock_mem_mhz;
    uint32_t bus_width_bits, l2_bytes, bar1_mib;
    uint32_t pcie_gen, copy_engines;
    /* ecc: the board has ECC memory. fan: the board has a fan. */
    bool ecc, fan;
    const struct sim_mig_profile *mig;
    /* Number of GPU-instance profiles; 0 if the model has no MIG. */
    uint32_t mig_count;
};

extern const struct sim_model sim_models[];
extern const unsigned sim_model_count;
const struct sim_model *sim_model_find(const char *key); /* Returns NULL for an unknown model. */

#endif
