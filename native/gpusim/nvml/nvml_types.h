/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The binary interface of NVML as far as the simulated driver implements it: return codes, enumerations, structures.
 *
 * Layouts and values are those of driver 535; a test compares each structure's size and
 * offsets with the ctypes definitions of nvidia-ml-py. A structure's version word has the size in the
 * low 24 bits and the version in the top 8.
 */
#ifndef GPUSIM_NVML_TYPES_H
#define GPUSIM_NVML_TYPES_H

#define NVML_API __attribute__((visibility("default")))
#define NVML_STRUCT_VERSION(type, version) ((unsigned)(sizeof(type) | ((unsigned)(version) << 24)))

typedef enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NO_PERMISSION = 4,
    NVML_ERROR_ALREADY_INITIALIZED = 5,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_INSUFFICIENT_POWER = 8,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
    NVML_ERROR_TIMEOUT = 10,
    NVML_ERROR_IRQ_ISSUE = 11,
    NVML_ERROR_LIBRARY_NOT_FOUND = 12,
    NVML_ERROR_FUNCTION_NOT_FOUND = 13,
    NVML_ERROR_CORRUPTED_INFOROM = 14,
    NVML_ERROR_GPU_IS_LOST = 15,
    NVML_ERROR_RESET_REQUIRED = 16,
    NVML_ERROR_OPERATING_SYSTEM = 17,
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18,
    NVML_ERROR_IN_USE = 19,
    NVML_ERROR_MEMORY = 20,
    NVML_ERROR_NO_DATA = 21,
    NVML_ERROR_VGPU_ECC_NOT_SUPPORTED = 22,
    NVML_ERROR_INSUFFICIENT_RESOURCES = 23,
    NVML_ERROR_FREQ_NOT_SUPPORTED = 24,
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
    NVML_ERROR_DEPRECATED = 26,
    NVML_ERROR_NOT_READY = 27,
    NVML_ERROR_GPU_NOT_FOUND = 28,
    NVML_ERROR_INVALID_STATE = 29,
    NVML_ERROR_UNKNOWN = 999,
} nvmlReturn_t;

typedef struct nvml_device *nvmlDevice_t;
typedef struct nvml_gpu_instance *nvmlGpuInstance_t;
typedef struct nvml_compute_instance *nvmlComputeInstance_t;
typedef struct nvml_event_set *nvmlEventSet_t;

enum { NVML_FEATURE_DISABLED = 0, NVML_FEATURE_ENABLED = 1 };
enum { NVML_INIT_FLAG_NO_GPUS = 1, NVML_INIT_FLAG_NO_ATTACH = 2 };
enum { NVML_BRAND_TESLA = 2, NVML_BRAND_GEFORCE = 5, NVML_BRAND_NVIDIA = 14 };
enum { NVML_CLOCK_GRAPHICS = 0, NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_CLOCK_VIDEO };
enum { NVML_CLOCK_ID_CURRENT = 0, NVML_CLOCK_ID_APP_TARGET, NVML_CLOCK_ID_APP_DEFAULT, NVML_CLOCK_ID_CUSTOMER_BOOST_MAX };
enum {
    NVML_TEMPERATURE_THRESHOLD_SHUTDOWN = 0,
    NVML_TEMPERATURE_THRESHOLD_SLOWDOWN,
    NVML_TEMPERATURE_THRESHOLD_MEM_MAX,
    NVML_TEMPERATURE_THRESHOLD_GPU_MAX,
};
enum {
    NVML_COMPUTEMODE_DEFAULT = 0,
    NVML_COMPUTEMODE_EXCLUSIVE_THREAD,
    NVML_COMPUTEMODE_PROHIBITED,
    NVML_COMPUTEMODE_EXCLUSIVE_PROCESS,
};
enum { NVML_MEMORY_ERROR_TYPE_CORRECTED = 0, NVML_MEMORY_ERROR_TYPE_UNCORRECTED };
enum { NVML_VOLATILE_ECC = 0, NVML_AGGREGATE_ECC };
enum {
    NVML_MEMORY_LOCATION_L1_CACHE = 0,
    NVML_MEMORY_LOCATION_L2_CACHE,
    NVML_MEMORY_LOCATION_DEVICE_MEMORY,
    NVML_MEMORY_LOCATION_REGISTER_FILE,
    NVML_MEMORY_LOCATION_TEXTURE_MEMORY,
    NVML_MEMORY_LOCATION_TEXTURE_SHM,
    NVML_MEMORY_LOCATION_CBU,
    NVML_MEMORY_LOCATION_SRAM,
    NVML_MEMORY_LOCATION_COUNT,
};
enum { NVML_GPU_VIRTUALIZATION_MODE_NONE = 0 };
enum {
    NVML_VALUE_TYPE_DOUBLE = 0,
    NVML_VALUE_TYPE_UNSIGNED_INT,
    NVML_VALUE_TYPE_UNSIGNED_LONG,
    NVML_VALUE_TYPE_UNSIGNED_LONG_LONG,
    NVML_VALUE_TYPE_SIGNED_LONG_LONG,
};
enum { NVML_INSTANCE_ID_NONE = 0xFFFFFFFFu };

#define NVML_EVENT_SINGLE_BIT_ECC 0x1ull
#define NVML_EVENT_DOUBLE_BIT_ECC 0x2ull
#define NVML_EVENT_PSTATE 0x4ull
#define NVML_EVENT_XID 0x8ull
#define NVML_EVENT_CLOCK 0x10ull
#define NVML_EVENT_MIG_CONFIG 0x100ull

#define NVML_CLOCKS_REASON_GPU_IDLE 0x1ull
#define NVML_CLOCKS_REASON_ALL 0x1ffull

typedef struct {
    char busIdLegacy[16];
    unsigned domain;
    unsigned bus;
    unsigned device;
    unsigned pciDeviceId;
    unsigned pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;

typedef struct {
    char busId[16];
    unsigned domain;
    unsigned bus;
    unsigned device;
    unsigned pciDeviceId;
    unsigned pciSubSystemId;
    unsigned reserved[4];
} nvmlPciInfo_v2_t;

typedef struct {
    unsigned version;
    unsigned domain;
    unsigned bus;
    unsigned device;
    unsigned pciDeviceId;
    unsigned pciSubSystemId;
    unsigned baseClass;
    unsigned subClass;
    char busId[32];
} nvmlPciInfoExt_t;

typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

typedef struct {
    unsigned long long bar1Total, bar1Free, bar1Used;
} nvmlBAR1Memory_t;

typedef struct {
    unsigned gpu, memory;
} nvmlUtilization_t;

/* Version 1 of the process list has no instance ids; versions 2 and 3 have the same layout. */
typedef struct {
    unsigned pid;
    unsigned long long usedGpuMemory;
} nvmlProcessInfo_v1_t;

typedef struct {
    unsigned pid;
    unsigned long long usedGpuMemory;
    unsigned gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;

typedef struct {
    unsigned pid;
    unsigned long long usedGpuMemory;
    unsigned gpuInstanceId, computeInstanceId;
    unsigned long long usedGpuCcProtectedMemory;
} nvmlProcessDetail_t;

typedef struct {
    unsigned version;
    unsigned mode;
    unsigned numProcArrayEntries;
    nvmlProcessDetail_t *procArray;
} nvmlProcessDetailList_t;

typedef struct {
    unsigned pid;
    unsigned long long timeStamp;
    unsigned smUtil, memUtil, encUtil, decUtil;
} nvmlProcessUtilizationSample_t;

typedef struct {
    unsigned long long timeStamp;
    unsigned pid;
    unsigned smUtil, memUtil, encUtil, decUtil, jpgUtil, ofaUtil;
} nvmlProcessUtilizationInfo_t;

typedef struct {
    unsigned version;
    unsigned processSamplesCount;
    unsigned long long lastSeenTimeStamp;
    nvmlProcessUtilizationInfo_t *procUtilArray;
} nvmlProcessesUtilizationInfo_t;

typedef union {
    double dVal;
    unsigned uiVal;
    unsigned long ulVal;
    unsigned long long ullVal;
    long long sllVal;
} nvmlValue_t;

typedef struct {
    unsigned long long timeStamp;
    nvmlValue_t sampleValue;
} nvmlSample_t;

typedef struct {
    unsigned fieldId;
    unsigned scopeId;
    long long timestamp;
    long long latencyUsec;
    unsigned valueType;
    nvmlReturn_t nvmlReturn;
    nvmlValue_t value;
} nvmlFieldValue_t;

typedef struct {
    unsigned version;
    /* scopeId: 0 means the GPU. The field is one byte wide, because nvidia-smi does not clear the padding after it. */
    unsigned char powerScope;
    unsigned powerValueMw;
} nvmlPowerValue_v2_t;

typedef struct {
    unsigned long long l1Cache, l2Cache, deviceMemory, registerFile;
} nvmlEccErrorCounts_t;

typedef struct {
    unsigned version;
    unsigned long long aggregateUncParity, aggregateUncSecDed, aggregateCor;
    unsigned long long volatileUncParity, volatileUncSecDed, volatileCor;
    unsigned long long aggregateUncBucketL2, aggregateUncBucketSm, aggregateUncBucketPcie;
    unsigned long long aggregateUncBucketMcu, aggregateUncBucketOther;
    unsigned bThresholdExceeded;
} nvmlEccSramErrorStatus_t;

typedef struct {
    unsigned gpuUtilization, memoryUtilization;
    unsigned long long maxMemoryUsage, time, startTime;
    unsigned isRunning;
    unsigned reserved[5];
} nvmlAccountingStats_t;

typedef struct {
    nvmlDevice_t device;
    unsigned long long eventType, eventData;
    unsigned gpuInstanceId, computeInstanceId;
} nvmlEventData_t;

typedef struct {
    nvmlDevice_t device;
    unsigned long long eventType, eventData;
} nvmlEventData_v1_t;

typedef struct {
    unsigned start, size;
} nvmlPlacement_t;

typedef struct {
    unsigned id, isP2pSupported, sliceCount, instanceCount, multiprocessorCount;
    unsigned copyEngineCount, decoderCount, encoderCount, jpegCount, ofaCount;
    unsigned long long memorySizeMB;
} nvmlGpuInstanceProfileInfo_t;

typedef struct {
    unsigned version;
    unsigned id, isP2pSupported, sliceCount, instanceCount, multiprocessorCount;
    unsigned copyEngineCount, decoderCount, encoderCount, jpegCount, ofaCount;
    unsigned long long memorySizeMB;
    char name[96];
} nvmlGpuInstanceProfileInfo_v2_t;

typedef struct {
    unsigned version;
    unsigned id, sliceCount, instanceCount, multiprocessorCount;
    unsigned copyEngineCount, decoderCount, encoderCount, jpegCount, ofaCount;
    unsigned long long memorySizeMB;
    char name[96];
    unsigned capabilities;
} nvmlGpuInstanceProfileInfo_v3_t;

typedef struct {
    nvmlDevice_t device;
    unsigned id, profileId;
    nvmlPlacement_t placement;
} nvmlGpuInstanceInfo_t;

typedef struct {
    unsigned id, sliceCount, instanceCount, multiprocessorCount;
    unsigned sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount, sharedJpegCount, sharedOfaCount;
} nvmlComputeInstanceProfileInfo_t;

typedef struct {
    unsigned version;
    unsigned id, sliceCount, instanceCount, multiprocessorCount;
    unsigned sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount, sharedJpegCount, sharedOfaCount;
    char name[96];
} nvmlComputeInstanceProfileInfo_v2_t;

typedef struct {
    unsigned version;
    unsigned id, sliceCount, instanceCount, multiprocessorCount;
    unsigned sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount, sharedJpegCount, sharedOfaCount;
    char name[96];
    unsigned capabilities;
} nvmlComputeInstanceProfileInfo_v3_t;

typedef struct {
    nvmlDevice_t device;
    nvmlGpuInstance_t gpuInstance;
    unsigned id, profileId;
    nvmlPlacement_t placement;
} nvmlComputeInstanceInfo_t;

typedef struct {
    unsigned multiprocessorCount, sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount;
    unsigned sharedJpegCount, sharedOfaCount, gpuInstanceSliceCount, computeInstanceSliceCount;
    unsigned long long memorySizeMB;
} nvmlDeviceAttributes_t;

typedef struct {
    unsigned max, high, partial, low, none;
} nvmlRowRemapperHistogram_t;

#endif
