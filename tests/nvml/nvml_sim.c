/* A stand-in for NVIDIA's libnvidia-ml.so.1, so that tests run the real pynvml on GPUs that are not there.
 *
 * Implements the calls that ensemble.common.gpus makes through pynvml; prototypes and struct layouts follow the
 * public NVML API reference (docs.nvidia.com/deploy/nvml-api).  All state is read anew at every call from the
 * text file that NVML_SIM_STATE names, so that a test can change it while a process runs; sim.py writes it.
 *
 * One fact a line, indented as you like; sizes in bytes, PCI numbers in hexadecimal:
 *
 *     driver VERSION                            at most once
 *     cuda NUMBER                               1000 * major + 10 * minor; no line: not supported
 *     loaded NUMBER                             how often the driver was loaded: what was opened before is stale
 *     process_name PID NAME                     NAME runs to the end of the line, as in every NAME below
 *     fail CALL CODE                            before the first gpu: CALL without "nvml", such as Init
 *     gpu UUID                                  opens a GPU; NVML's index is the order in the file
 *       name NAME
 *       pci DOMAIN BUS DEVICE
 *       cc MAJOR MINOR                          no line: not supported
 *       memory TOTAL RESERVED USED              RESERVED counts as used for version 1 of the question only
 *       process PID USED|-                      -: the driver does not know how much
 *       mig MODE MAX_SLICES                     MODE 1: on, 0: off; no line: not supported
 *       fail CALL|* CODE AFTER                  on this GPU, once this process has asked it AFTER questions
 *       slice NUMBER UUID GPU_INSTANCE COMPUTE_INSTANCE
 *                                               opens a MIG slice; name, memory, process go to it
 *
 * nvmlInit and the nvmlShutdown that ends it append a line to the file's name with ".sessions": "open PID", "close PID".
 *
 * -DOLD_DRIVER leaves out the symbols that drivers before R510 (and R535) do not have.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned long long u64;
typedef unsigned int u32;
typedef void *nvmlDevice_t;

enum {
    HANGS = -1, /* not NVML's: the call never returns */
    OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    VERSION_MISMATCH = 25, UNKNOWN = 999
};
enum { MAX_GPUS = 16, MAX_PARTS = 9, MAX_PROCESSES = 8, MAX_FAILS = 8, MAX_NAMES = 16 };
enum { MEMORY_V2 = 0x02000028, NO_INSTANCE = 0xFFFFFFFF, FIRST_HANDLE = 0x5100 };

typedef struct { u64 total, free, used; } Memory;
typedef struct { u32 version; u64 total, reserved, free, used; } MemoryV2;
typedef struct { u32 pid; u64 used; u32 gpu_instance, compute_instance; } Process;
typedef struct {
    char bus_id_legacy[16];
    u32 domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
} PciInfo;

typedef struct { char call[64]; int code, after; } Fail;
typedef struct { u32 pid; char name[256]; } Name;
/* Part 0 of a GPU is the GPU itself, part 1 + NUMBER a slice of it. */
typedef struct {
    char uuid[96], name[96];
    u64 total, reserved, used;
    u32 gpu_instance, compute_instance;
    int processes;
    Process process[MAX_PROCESSES];
} Part;
typedef struct {
    Part part[MAX_PARTS];
    u32 domain, bus, device;
    int major, minor, mig_mode, mig_slices, fails;
    Fail fail[MAX_FAILS];
} Gpu;
typedef struct {
    char driver[80];
    int cuda, loaded, gpus, fails, names;
    Gpu gpu[MAX_GPUS];
    Fail fail[MAX_FAILS];
    Name name[MAX_NAMES];
} State;
/* What a call about a device has in hand. */
typedef struct { State *state; Gpu *gpu; Part *part; } Query;

static int init_count, loaded_then;
static int questions[MAX_GPUS];

static void read_fail(const char *line, Fail *fails, int *count)
{
    Fail *fail = &fails[*count];
    if (*count == MAX_FAILS) return;
    if (sscanf(line, "fail %63s %d %d", fail->call, &fail->code, &fail->after) >= 2) ++*count;
}

static void read_part_line(const char *line, Part *part)
{
    u32 pid;
    char used[32];
    if (sscanf(line, "name %95[^\n]", part->name) == 1) return;
    if (sscanf(line, "memory %llu %llu %llu", &part->total, &part->reserved, &part->used) == 3) return;
    if (sscanf(line, "process %u %31s", &pid, used) == 2 && part->processes < MAX_PROCESSES) {
        Process *process = &part->process[part->processes++];
        process->pid = pid;
        process->used = *used == '-' ? ~0ULL : strtoull(used, NULL, 10);
        process->gpu_instance = part->gpu_instance;
        process->compute_instance = part->compute_instance;
    }
}

static Part *new_part(Gpu *gpu, u32 number)
{
    Part *part = &gpu->part[number < MAX_PARTS ? number : MAX_PARTS - 1];
    part->gpu_instance = part->compute_instance = NO_INSTANCE;
    return part;
}

static void read_gpu_line(const char *line, Gpu *gpu, Part **part)
{
    u32 number;
    if (sscanf(line, "pci %x %x %x", &gpu->domain, &gpu->bus, &gpu->device) == 3) return;
    if (sscanf(line, "cc %d %d", &gpu->major, &gpu->minor) == 2) return;
    if (sscanf(line, "mig %d %d", &gpu->mig_mode, &gpu->mig_slices) == 2) return;
    if (strncmp(line, "fail ", 5) == 0) {
        read_fail(line, gpu->fail, &gpu->fails);
    } else if (sscanf(line, "slice %u", &number) == 1) {
        *part = new_part(gpu, 1 + number);
        Part *slice = *part;
        sscanf(line, "slice %*u %95s %u %u", slice->uuid, &slice->gpu_instance, &slice->compute_instance);
    } else {
        read_part_line(line, *part);
    }
}

static void read_line(const char *line, State *state, Gpu **gpu, Part **part)
{
    char uuid[96];
    if (sscanf(line, "gpu %95s", uuid) == 1 && state->gpus < MAX_GPUS) {
        *gpu = &state->gpu[state->gpus++];
        *part = new_part(*gpu, 0);
        memcpy((*part)->uuid, uuid, sizeof uuid);
        (*gpu)->mig_mode = -1;
    } else if (*gpu) {
        read_gpu_line(line, *gpu, part);
    } else if (strncmp(line, "process_name ", 13) == 0 && state->names < MAX_NAMES) {
        Name *name = &state->name[state->names];
        if (sscanf(line, "process_name %u %255[^\n]", &name->pid, name->name) == 2) ++state->names;
    } else if (strncmp(line, "fail ", 5) == 0) {
        read_fail(line, state->fail, &state->fails);
    } else if (sscanf(line, "cuda %d", &state->cuda) != 1 && sscanf(line, "loaded %d", &state->loaded) != 1) {
        sscanf(line, "driver %79s", state->driver);
    }
}

/* The state, to be freed, or NULL without a state file. */
static State *load(void)
{
    const char *path = getenv("NVML_SIM_STATE");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!file) return NULL;
    State *state = calloc(1, sizeof *state);
    Gpu *gpu = NULL;
    Part *part = NULL;
    char line[512];
    while (state && fgets(line, sizeof line, file)) read_line(line + strspn(line, " "), state, &gpu, &part);
    fclose(file);
    return state;
}

static int failure(const Fail *fail, int fails, const char *call, int asked)
{
    for (int i = 0; i < fails; i++) {
        int meant = !strcmp(fail[i].call, "*") || !strcmp(fail[i].call, call);
        if (!meant || asked < fail[i].after) continue;
        while (fail[i].code == HANGS) pause();
        return fail[i].code;
    }
    return OK;
}

/* Begins a call that is about no device; on OK *state is the caller's to free. */
static int begin(const char *call, State **state)
{
    if (init_count <= 0) return UNINITIALIZED;
    if (!(*state = load())) return UNKNOWN;
    int code = failure((*state)->fail, (*state)->fails, call, 0);
    if ((*state)->loaded != loaded_then) code = UNINITIALIZED;
    if (code) free(*state);
    return code;
}

/* Begins a call about part `number` of GPU `index`; on OK q->state is the caller's to free. */
static int begin_part(const char *call, u32 index, u32 number, Query *q)
{
    int code = begin(call, &q->state);
    if (code) return code;
    q->gpu = &q->state->gpu[index % MAX_GPUS];
    q->part = &q->gpu->part[number % MAX_PARTS];
    if (index >= (u32)q->state->gpus) {
        code = INVALID_ARGUMENT;
    } else if (number >= MAX_PARTS || !*q->part->uuid) {
        code = NOT_FOUND;
    } else {
        int asked = __atomic_fetch_add(&questions[index], 1, __ATOMIC_RELAXED);
        code = failure(q->gpu->fail, q->gpu->fails, call, asked);
    }
    if (code) free(q->state);
    return code;
}

/* A handle is a number that no pointer has: FIRST_HANDLE + GPU index * 16 + part. */
static nvmlDevice_t to_handle(u32 index, u32 number)
{
    return (nvmlDevice_t)(size_t)(FIRST_HANDLE + index * 16 + number);
}

static u32 index_of(nvmlDevice_t handle) { return (u32)(((size_t)handle - FIRST_HANDLE) / 16); }
static u32 number_of(nvmlDevice_t handle) { return (u32)(((size_t)handle - FIRST_HANDLE) % 16); }

static int begin_handle(const char *call, nvmlDevice_t handle, Query *q)
{
    return begin_part(call, index_of(handle), number_of(handle), q);
}

static int copy(char *target, u32 length, const char *text)
{
    if (strlen(text) >= length) return INSUFFICIENT_SIZE;
    strcpy(target, text);
    return OK;
}

static void note(const char *what)
{
    char path[4096];
    snprintf(path, sizeof path, "%s.sessions", getenv("NVML_SIM_STATE"));
    FILE *file = fopen(path, "a");
    if (!file) return;
    fprintf(file, "%s %d\n", what, (int)getpid());
    fclose(file);
}

int nvmlInitWithFlags(u32 flags)
{
    (void)flags;
    State *state = load();
    if (!state) return UNKNOWN;
    int code = failure(state->fail, state->fails, "Init", 0);
    if (!code && init_count++ == 0) {
        loaded_then = state->loaded;
        note("open");
    }
    free(state);
    return code;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void)
{
    if (init_count <= 0) return UNINITIALIZED;
    if (--init_count == 0) note("close");
    return OK;
}

const char *nvmlErrorString(int code) { return code == OK ? "Success" : "Simulated Error"; }

int nvmlSystemGetDriverVersion(char *version, u32 length)
{
    State *state;
    int code = begin("SystemGetDriverVersion", &state);
    if (code) return code;
    code = copy(version, length, state->driver);
    free(state);
    return code;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    State *state;
    int code = begin("SystemGetCudaDriverVersion_v2", &state);
    if (code) return code;
    *version = state->cuda;
    code = state->cuda ? OK : NOT_SUPPORTED;
    free(state);
    return code;
}

int nvmlSystemGetProcessName(u32 pid, char *name, u32 length)
{
    State *state;
    int code = begin("SystemGetProcessName", &state);
    if (code) return code;
    code = NOT_FOUND;
    for (int i = 0; i < state->names; i++)
        if (state->name[i].pid == pid) code = copy(name, length, state->name[i].name);
    free(state);
    return code;
}

int nvmlDeviceGetCount_v2(u32 *count)
{
    State *state;
    int code = begin("DeviceGetCount", &state);
    if (code) return code;
    *count = (u32)state->gpus;
    free(state);
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(u32 index, nvmlDevice_t *handle)
{
    Query q;
    int code = begin_part("DeviceGetHandleByIndex", index, 0, &q);
    if (code) return code;
    *handle = to_handle(index, 0);
    free(q.state);
    return OK;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *handle)
{
    State *state;
    int code = begin("DeviceGetHandleByUUID", &state);
    if (code) return code;
    u32 index = MAX_GPUS, number = 0;
    for (u32 g = 0; g < (u32)state->gpus; g++)
        for (u32 p = 0; p < MAX_PARTS; p++)
            if (*uuid && !strcmp(state->gpu[g].part[p].uuid, uuid)) index = g, number = p;
    free(state);
    if (index == MAX_GPUS) return NOT_FOUND;
    Query q;
    code = begin_part("DeviceGetHandleByUUID", index, number, &q);
    if (code) return code;
    *handle = to_handle(index, number);
    free(q.state);
    return OK;
}

int nvmlDeviceGetUUID(nvmlDevice_t handle, char *uuid, u32 length)
{
    Query q;
    int code = begin_handle("DeviceGetUUID", handle, &q);
    if (code) return code;
    code = copy(uuid, length, q.part->uuid);
    free(q.state);
    return code;
}

int nvmlDeviceGetName(nvmlDevice_t handle, char *name, u32 length)
{
    Query q;
    int code = begin_handle("DeviceGetName", handle, &q);
    if (code) return code;
    code = *q.part->name ? copy(name, length, q.part->name) : NOT_SUPPORTED;
    free(q.state);
    return code;
}

int nvmlDeviceGetPciInfo_v3(nvmlDevice_t handle, PciInfo *info)
{
    Query q;
    int code = begin_handle("DeviceGetPciInfo", handle, &q);
    if (code) return code;
    memset(info, 0, sizeof *info);
    info->domain = q.gpu->domain;
    info->bus = q.gpu->bus;
    info->device = q.gpu->device;
    snprintf(info->bus_id, sizeof info->bus_id, "%08X:%02X:%02X.0", q.gpu->domain, q.gpu->bus, q.gpu->device);
    free(q.state);
    return OK;
}

int nvmlDeviceGetCudaComputeCapability(nvmlDevice_t handle, int *major, int *minor)
{
    Query q;
    int code = begin_handle("DeviceGetCudaComputeCapability", handle, &q);
    if (code) return code;
    *major = q.gpu->major;
    *minor = q.gpu->minor;
    code = q.gpu->major ? OK : NOT_SUPPORTED;
    free(q.state);
    return code;
}

/* Total, reserved and used now, without what is reserved. */
static int memory(nvmlDevice_t handle, u64 *total, u64 *reserved, u64 *used)
{
    Query q;
    int code = begin_handle("DeviceGetMemoryInfo", handle, &q);
    if (code) return code;
    *total = q.part->total;
    *reserved = q.part->reserved;
    *used = q.part->used;
    free(q.state);
    return OK;
}

int nvmlDeviceGetMemoryInfo(nvmlDevice_t handle, Memory *info)
{
    u64 total, reserved, used;
    int code = memory(handle, &total, &reserved, &used);
    if (code) return code;
    info->total = total;
    info->used = used + reserved;
    info->free = total - info->used;
    return OK;
}

#ifndef OLD_DRIVER
int nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t handle, MemoryV2 *info)
{
    u64 total, reserved, used;
    if (info->version != MEMORY_V2) return VERSION_MISMATCH;
    int code = memory(handle, &total, &reserved, &used);
    if (code) return code;
    info->total = total;
    info->reserved = reserved;
    info->used = used;
    info->free = total - reserved - used;
    return OK;
}
#endif

/* As the real one: without room, says how many there are and returns INSUFFICIENT_SIZE. */
int nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t handle, u32 *count, Process *processes)
{
    Query q;
    int code = begin_handle("DeviceGetComputeRunningProcesses", handle, &q);
    if (code) return code;
    u32 room = *count;
    *count = (u32)q.part->processes;
    if (room < *count)
        code = INSUFFICIENT_SIZE;
    else if (processes)
        memcpy(processes, q.part->process, *count * sizeof *processes);
    free(q.state);
    return code;
}

#ifndef OLD_DRIVER
int nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t handle, u32 *count, Process *processes)
{
    return nvmlDeviceGetComputeRunningProcesses_v2(handle, count, processes);
}
#endif

int nvmlDeviceGetMigMode(nvmlDevice_t handle, u32 *current, u32 *pending)
{
    Query q;
    int code = begin_handle("DeviceGetMigMode", handle, &q);
    if (code) return code;
    *current = *pending = (u32)q.gpu->mig_mode;
    code = q.gpu->mig_mode >= 0 ? OK : NOT_SUPPORTED;
    free(q.state);
    return code;
}

int nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t handle, u32 *count)
{
    Query q;
    int code = begin_handle("DeviceGetMaxMigDeviceCount", handle, &q);
    if (code) return code;
    *count = (u32)q.gpu->mig_slices;
    free(q.state);
    return OK;
}

int nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t handle, u32 number, nvmlDevice_t *slice)
{
    Query q;
    u32 index = index_of(handle);
    int code = begin_part("DeviceGetMigDeviceHandleByIndex", index, 1 + number, &q);
    if (code) return code;
    *slice = to_handle(index, 1 + number);
    free(q.state);
    return OK;
}

static int instances(const char *call, nvmlDevice_t handle, u32 *gpu_instance, u32 *compute_instance)
{
    Query q;
    int code = begin_handle(call, handle, &q);
    if (code) return code;
    *gpu_instance = q.part->gpu_instance;
    *compute_instance = q.part->compute_instance;
    free(q.state);
    return OK;
}

int nvmlDeviceGetGpuInstanceId(nvmlDevice_t handle, u32 *id)
{
    u32 other;
    return instances("DeviceGetGpuInstanceId", handle, id, &other);
}

int nvmlDeviceGetComputeInstanceId(nvmlDevice_t handle, u32 *id)
{
    u32 other;
    return instances("DeviceGetComputeInstanceId", handle, &other, id);
}
