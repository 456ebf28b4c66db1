/* The slice of DLPack's ABI that we read: https://dmlc.github.io/dlpack
 *
 * DLPack is a contract between libraries that share no code: each declares the structs
 * and goes by the numbers below, which never change within a major version. Names and
 * values are DLPack's of major version 1; the unversioned struct is that of version 0.
 */
#ifndef PY_DLPACK_H
#define PY_DLPACK_H

#include <stddef.h>
#include <stdint.h>

enum { PY_DL_MAJOR = 1 };

/* Names of capsules: before they are taken, and after. */
#define PY_DL_NAME "dltensor"
#define PY_DL_NAME_USED "used_dltensor"
#define PY_DL_NAME_VERSIONED "dltensor_versioned"
#define PY_DL_NAME_VERSIONED_USED "used_dltensor_versioned"
#define PY_DL_NAME_EXCHANGE "dlpack_exchange_api"

typedef enum py_dl_device_type {
    PY_DL_CPU = 1,
    PY_DL_CUDA = 2,
    PY_DL_CUDA_HOST = 3, /* pinned: the CPU reads and writes it as its own */
    PY_DL_OPENCL = 4,
    PY_DL_VULKAN = 7,
    PY_DL_METAL = 8,
    PY_DL_VPI = 9,
    PY_DL_ROCM = 10,
    PY_DL_ROCM_HOST = 11, /* pinned */
    PY_DL_EXT_DEV = 12,
    PY_DL_CUDA_MANAGED = 13,
    PY_DL_ONE_API = 14,
    PY_DL_WEB_GPU = 15,
    PY_DL_HEXAGON = 16,
    PY_DL_MAIA = 17,
    PY_DL_TRN = 18,
} py_dl_device_type;

typedef enum py_dl_code {
    PY_DL_INT = 0,
    PY_DL_UINT = 1,
    PY_DL_FLOAT = 2,
    PY_DL_BFLOAT = 4,
    PY_DL_COMPLEX = 5,
    PY_DL_BOOL = 6,
    PY_DL_FLOAT8_E4M3FN = 10,
    PY_DL_FLOAT8_E5M2 = 12,
} py_dl_code;

typedef struct py_dl_version {
    uint32_t major;
    uint32_t minor;
} py_dl_version;

typedef struct py_dl_device {
    int32_t type; /* py_dl_device_type, or one that is newer than this list */
    int32_t id;
} py_dl_device;

typedef struct py_dl_dtype {
    uint8_t code; /* py_dl_code, or another */
    uint8_t bits;
    uint16_t lanes;
} py_dl_dtype;

typedef struct py_dl_tensor {
    void *data;
    py_dl_device device;
    int32_t ndim;
    py_dl_dtype dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL: C-contiguous */
    uint64_t byte_offset;
} py_dl_tensor;

/* "dltensor" */
typedef struct py_dl_managed {
    py_dl_tensor tensor;
    void *context;
    void (*deleter)(struct py_dl_managed *self); /* may be NULL */
} py_dl_managed;

enum { PY_DL_READ_ONLY = 1 };

/* "dltensor_versioned". With another major version nothing below `flags` may be read. */
typedef struct py_dl_versioned {
    py_dl_version version;
    void *context;
    void (*deleter)(struct py_dl_versioned *self); /* may be NULL */
    uint64_t flags;                                /* PY_DL_READ_ONLY */
    py_dl_tensor tensor;
} py_dl_versioned;

/* type(tensor).__dlpack_c_exchange_api__: functions of the library that made the tensor,
 * called with the GIL held. Those that we do not call are untyped. */
typedef struct py_dl_exchange {
    py_dl_version version;
    struct py_dl_exchange *previous; /* of an older major version, or NULL */
    void (*allocate)(void);
    /* A new owner of the memory of `tensor`. 0, or -1 with an exception. */
    int (*own)(void *tensor, py_dl_versioned **out);
    void (*import)(void);
    /* The memory of `tensor` as it is now; shape and strides are the tensor's. May be
     * NULL. 0, or -1 with an exception. */
    int (*look)(void *tensor, py_dl_tensor *out);
    void (*current_stream)(void);
} py_dl_exchange;

#endif
