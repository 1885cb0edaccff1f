/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The model table: the properties of each GPU model as NVML and CUDA report them. memory_mib is the total that NVML
 * reports. context_mib is the memory that one CUDA context takes on driver 535; this figure is never zero, and a
 * profile may override it, because it differs between driver builds.
 */
#include "models_mig.h"

#include <stddef.h>
#include <strings.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define PCI(device, vendor) ((uint32_t)(device) << 16 | (vendor))
#define NVIDIA 0x10deu


#define NO_MIG .mig = NULL, .mig_count = 0

const struct sim_model sim_models[] = {
    {.key = "T4", .name = "Tesla T4", .arch = SIM_TURING, .memory_mib = 15360, .context_mib = 104,
     .sm_count = 40, .cores_per_sm = 64, .threads_per_sm = 1024, .shared_per_sm = 65536, .shared_per_block_optin = 65536,
     .cc_major = 7, .cc_minor = 5, .pci_device_id = PCI(0x1eb8, NVIDIA), .pci_subsystem_id = PCI(0x12a2, NVIDIA),
     .brand = 2, .power_limit_mw = 70000, .idle_power_mw = 9000, .clock_sm_mhz = 1590, .clock_mem_mhz = 5001,
     .bus_width_bits = 256, .l2_bytes = 4194304, .bar1_mib = 256, .pcie_gen = 3, .copy_engines = 3, .ecc = true,
     NO_MIG},
    {.key = "V100-16GB", .name = "Tesla V100-SXM2-16GB", .arch = SIM_VOLTA, .memory_mib = 16160, .context_mib = 308,
     .sm_count = 80, .cores_per_sm = 64, .threads_per_sm = 2048, .shared_per_sm = 98304, .shared_per_block_optin = 98304,
     .cc_major = 7, .cc_minor = 0, .pci_device_id = PCI(0x1db1, NVIDIA), .pci_subsystem_id = PCI(0x1212, NVIDIA),
     .brand = 2, .power_limit_mw = 300000, .idle_power_mw = 24000, .clock_sm_mhz = 1530, .clock_mem_mhz = 877,
     .bus_width_bits = 4096, .l2_bytes = 6291456, .bar1_mib = 16384, .pcie_gen = 3, .copy_engines = 6, .ecc = true,
     NO_MIG},
    {.key = "A100-40GB", .name = "NVIDIA A100-SXM4-40GB", .arch = SIM_AMPERE, .memory_mib = 40960, .context_mib = 412,
     .sm_count = 108, .cores_per_sm = 64, .threads_per_sm = 2048, .shared_per_sm = 167936,
     .shared_per_block_optin = 166912, .cc_major = 8, .cc_minor = 0, .pci_device_id = PCI(0x20b0, NVIDIA),
     .pci_subsystem_id = PCI(0x144e, NVIDIA), .brand = 14, .power_limit_mw = 400000, .idle_power_mw = 45000,
     .clock_sm_mhz = 1410, .clock_mem_mhz = 1215, .bus_width_bits = 5120, .l2_bytes = 41943040, .bar1_mib = 65536,
     .pcie_gen = 4, .copy_engines = 5, .ecc = true, SIM_MIG(sim_mig_a100_40)},
    {.key = "A100-80GB", .name = "NVIDIA A100-SXM4-80GB", .arch = SIM_AMPERE, .memory_mib = 81920, .context_mib = 412,
     .sm_count = 108, .cores_per_sm = 64, .threads_per_sm = 2048, .shared_per_sm = 167936,
     .shared_per_block_optin = 166912, .cc_major = 8, .cc_minor = 0, .pci_device_id = PCI(0x20b2, NVIDIA),
     .pci_subsystem_id = PCI(0x1463, NVIDIA), .brand = 14, .power_limit_mw = 400000, .idle_power_mw = 55000,
     .clock_sm_mhz = 1410, .clock_mem_mhz = 1593, .bus_width_bits = 5120, .l2_bytes = 41943040, .bar1_mib = 131072,
     .pcie_gen = 4, .copy_engines = 5, .ecc = true, SIM_MIG(sim_mig_a100_80)},
    {.key = "H100-80GB", .name = "NVIDIA H100 80GB HBM3", .arch = SIM_HOPPER, .memory_mib = 81559, .context_mib = 524,
     .sm_count = 132, .cores_per_sm = 128, .threads_per_sm = 2048, .shared_per_sm = 233472,
     .shared_per_block_optin = 232448, .cc_major = 9, .cc_minor = 0, .pci_device_id = PCI(0x2330, NVIDIA),
     .pci_subsystem_id = PCI(0x16c1, NVIDIA), .brand = 14, .power_limit_mw = 700000, .idle_power_mw = 70000,
     .clock_sm_mhz = 1980, .clock_mem_mhz = 2619, .bus_width_bits = 5120, .l2_bytes = 52428800, .bar1_mib = 131072,
     .pcie_gen = 5, .copy_engines = 3, .ecc = true, SIM_MIG(sim_mig_h100_80)},
    {.key = "H200", .name = "NVIDIA H200", .arch = SIM_HOPPER, .memory_mib = 143771, .context_mib = 528,
     .sm_count = 132, .cores_per_sm = 128, .threads_per_sm = 2048, .shared_per_sm = 233472,
     .shared_per_block_optin = 232448, .cc_major = 9, .cc_minor = 0, .pci_device_id = PCI(0x2335, NVIDIA),
     .pci_subsystem_id = PCI(0x18be, NVIDIA), .brand = 14, .power_limit_mw = 700000, .idle_power_mw = 75000,
     .clock_sm_mhz = 1980, .clock_mem_mhz = 3201, .bus_width_bits = 6144, .l2_bytes = 62914560, .bar1_mib = 262144,
     .pcie_gen = 5, .copy_engines = 3, .ecc = true, SIM_MIG(sim_mig_h200)},
    {.key = "GTX-1080-Ti", .name = "NVIDIA GeForce GTX 1080 Ti", .arch = SIM_PASCAL, .memory_mib = 11178,
     .context_mib = 146, .sm_count = 28, .cores_per_sm = 128, .threads_per_sm = 2048, .shared_per_sm = 98304,
     .shared_per_block_optin = 49152, .cc_major = 6, .cc_minor = 1, .pci_device_id = PCI(0x1b06, NVIDIA),
     .pci_subsystem_id = PCI(0x120f, NVIDIA), .brand = 5, .power_limit_mw = 250000, .idle_power_mw = 9000,
     .clock_sm_mhz = 1911, .clock_mem_mhz = 5505, .bus_width_bits = 352, .l2_bytes = 2883584, .bar1_mib = 256,
     .pcie_gen = 3, .copy_engines = 2, .ecc = false, .fan = true, NO_MIG},
};

const unsigned sim_model_count = COUNT(sim_models);

const struct sim_model *sim_model_find(const char *key)
{
    for (unsigned i = 0; i < sim_model_count; i++)
        if (strcasecmp(sim_models[i].key, key) == 0)
            return &sim_models[i];
    return NULL;
}
