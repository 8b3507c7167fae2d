/* A stand-in for libcuda.so.1 over host memory, for tests of programs that call the driver.
 *
 * What it is not: it compiles and runs no PTX. It knows the probe's kernels by the names of their entry points and does what
 * they say they do. Time is not measured but computed: an event holds its stream's own time, which a copy advances by
 * latency + size / bandwidth of the plan, so figures do not depend on how fast the tests run.
 *
 * Memory is lazy. An allocation is a list of runs; a run is a repeated word, or a repeated block of bytes that was uploaded once
 * and is kept for ever, at a phase. Copying between devices copies runs. An upload that repeats a kept block (compared byte by
 * byte) becomes a run of it. Real bytes are only written where the host reads. 256 MiB of a pattern are one run.
 *
 * The plan is the text file $FAKE_CUDA_PLAN, else /etc/fake-cuda.plan, a statement a line ("#" begins a comment, "*" fits every device):
 *   device PCI UUID(32 hex digits) MEMORY_MIB [NAME…]           in CUDA's order
 *   local PCI GBPS US · link SRC DST GBPS US                    GB/s and microseconds of a copy; the last that fits counts
 *   deny SRC DST                                                the driver says that SRC cannot reach DST
 *   rank SRC DST N                                              its performance rank
 *   kmsg FILE · proc FOLDER                                     where kernel lines, and states of processes, are written
 *   fault SRC DST PATH MIN MAX [together] [from N] KIND [ARGUMENT]
 *     PATH: ce-push ce-pull sm-store sm-load local, peer (any of the first four), init, context, module;  MIN, MAX: bytes of one copy
 *     KIND: lost · zeros · shift BYTES · garbage WORDS · error CODE · hang · stall (hang, and state D) · crash · gbps X ·
 *           line TEXT (a kernel line; %a is the initiator's address) · once-wrong FILE (wrong while FILE does not exist; makes it) ·
 *           poke FILE WORD (the word is written into the file, %a as above: where a real kernel has a device that can be told to)
 *     together: only while another stream has work that nobody has asked about; from N: not for the first N copies of a process
 * Several faults may fit one copy; all of them happen.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifdef WITH_CUDA_H /* the same text, held against the prototypes of the real header */
#include <cuda.h>
#else
typedef int CUresult;
typedef int CUdevice;
typedef int CUdevice_P2PAttribute;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct { char bytes[16]; } CUuuid;
#endif

enum { MAX_DEVICES = 16, MAX_RULES = 512, WAY_LOCAL = 4, MAX_BLOCK = 4 << 20 };
static const char *const WAYS[] = {"ce-push", "ce-pull", "sm-store", "sm-load", "local"};

static void die(const char *format, ...) {
    va_list more;
    va_start(more, format);
    char text[512] = "fake libcuda: ";
    vsnprintf(text + strlen(text), sizeof text - strlen(text), format, more);
    strncat(text, "\n", sizeof text - strlen(text) - 1);
    if (write(2, text, strlen(text)) < 0) _exit(99);
    _exit(98);
}

/* ---------------------------------------------------------------------------------------------------------- the plan */

typedef struct { char pci[16], name[96]; unsigned char uuid[16]; size_t memory; double gbps, us; } Device;
typedef struct { char src[16], dst[16], path[16], kind[16], argument[256]; double low, high; int together, from, hits; } Fault;
typedef struct { char what[8], src[16], dst[16]; double first, second; } Rule;

static Device devices[MAX_DEVICES];
static Fault faults[MAX_RULES];
static Rule rules[MAX_RULES];
static int device_count, fault_count, rule_count, ready;
static char kmsg[512], proc_folder[512];

static int fits(const char *wanted, const char *given) { return !strcmp(wanted, "*") || !strcasecmp(wanted, given); }

static void read_device(const char *line) {
    Device *d = &devices[device_count++];
    char uuid[64];
    unsigned long mib;
    int used = 0;
    if (device_count > MAX_DEVICES || sscanf(line, "device %15s %63s %lu %n", d->pci, uuid, &mib, &used) != 3 || strlen(uuid) != 32)
        die("bad line in the plan: %s", line);
    snprintf(d->name, sizeof d->name, "%s", line[used] ? line + used : "Fake GPU");
    for (int i = 0; i < 16; i++) sscanf(uuid + 2 * i, "%2hhx", &d->uuid[i]);
    d->memory = (size_t)mib << 20;
    d->gbps = 1400, d->us = 2;
}

static void read_fault(const char *line) {
    Fault *f = &faults[fault_count++];
    int used = 0, more = 0;
    if (fault_count > MAX_RULES ||
        sscanf(line, "fault %15s %15s %15s %lf %lf %n", f->src, f->dst, f->path, &f->low, &f->high, &used) != 5)
        die("bad line in the plan: %s", line);
    const char *rest = line + used;
    if (!strncmp(rest, "together ", 9)) f->together = 1, rest += 9;
    if (sscanf(rest, "from %d %n", &f->from, &more) == 1) rest += more;
    if (sscanf(rest, "%15s %n", f->kind, &used) != 1) die("bad line in the plan: %s", line);
    snprintf(f->argument, sizeof f->argument, "%s", rest + used);
    static const char *const known[] = {"lost", "zeros", "shift", "garbage", "error", "hang", "stall", "crash", "gbps", "line", "once-wrong", "poke"};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(known[i], f->kind)) return;
    die("unknown kind of fault: %s", f->kind);
}

static void read_plan(void) {
    const char *path = getenv("FAKE_CUDA_PLAN") ? getenv("FAKE_CUDA_PLAN") : "/etc/fake-cuda.plan";
    FILE *file = fopen(path, "r");
    if (!file) die("no plan: %s cannot be read, and FAKE_CUDA_PLAN names no other", path);
    char line[1024];
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        Rule *r = &rules[rule_count];
        if (!line[0] || line[0] == '#') continue;
        if (!strncmp(line, "device ", 7)) read_device(line);
        else if (!strncmp(line, "fault ", 6)) read_fault(line);
        else if (sscanf(line, "kmsg %511s", kmsg) == 1 || sscanf(line, "proc %511s", proc_folder) == 1) continue;
        else if (rule_count >= MAX_RULES) die("too many lines in the plan");
        else if (sscanf(line, "local %15s %lf %lf", r->src, &r->first, &r->second) == 3) strcpy(r->what, "local"), rule_count++;
        else if (sscanf(line, "link %15s %15s %lf %lf", r->src, r->dst, &r->first, &r->second) == 4) strcpy(r->what, "link"), rule_count++;
        else if (sscanf(line, "deny %15s %15s", r->src, r->dst) == 2) strcpy(r->what, "deny"), rule_count++;
        else if (sscanf(line, "rank %15s %15s %lf", r->src, r->dst, &r->first) == 3) strcpy(r->what, "rank"), rule_count++;
        else die("bad line in the plan: %s", line);
    }
    fclose(file);
}

static const Rule *rule(const char *what, int src, int dst) {
    const Rule *found = NULL;
    for (int i = 0; i < rule_count; i++)
        if (!strcmp(rules[i].what, what) && fits(rules[i].src, devices[src].pci) &&
            (!rules[i].dst[0] || fits(rules[i].dst, devices[dst].pci)))
            found = &rules[i];
    return found;
}

/* ------------------------------------------------------------------------------------------------------------ memory */

typedef struct Block { unsigned char *bytes; size_t length; struct Block *next; } Block;
typedef struct { size_t offset, length, phase; Block *block; uint32_t word; } Run; /* block NULL: the word, repeated */
typedef struct Allocation { uint64_t address; size_t size; int device, count, room; Run *runs; struct Allocation *next; } Allocation;
typedef struct { size_t count, room; Run *runs; } Runs;

static Block *blocks;
static Allocation *allocations;
static uint64_t next_address = 0x7f0000000000ULL - ((uint64_t)1 << 44);

static size_t period(const Run *r) { return r->block ? r->block->length : 4; }

static Allocation *at(CUdeviceptr address, size_t length) {
    for (Allocation *a = allocations; a; a = a->next)
        if (address >= a->address && address + length <= a->address + a->size) return a;
    return NULL;
}

static void push(Runs *list, Run run) {
    if (!run.length) return;
    if (list->count) {
        Run *last = &list->runs[list->count - 1];
        if (last->block == run.block && (run.block || last->word == run.word) &&
            (last->phase + last->length) % period(&run) == run.phase) {
            last->length += run.length;
            return;
        }
    }
    if (list->count == list->room) list->runs = realloc(list->runs, (list->room = list->room * 2 + 8) * sizeof(Run));
    if (!list->runs) die("out of host memory");
    list->runs[list->count++] = run;
}

/* The part [begin, end) of a run. */
static Run part(const Run *r, size_t begin, size_t end) {
    Run cut = *r;
    cut.length = end - begin;
    cut.phase = (r->phase + begin - r->offset) % period(r);
    return cut;
}

static void take(const Allocation *a, size_t offset, size_t length, Runs *into) {
    for (int i = 0; i < a->count; i++) {
        const Run *r = &a->runs[i];
        size_t begin = r->offset > offset ? r->offset : offset;
        size_t end = r->offset + r->length < offset + length ? r->offset + r->length : offset + length;
        if (begin < end) push(into, part(r, begin, end));
    }
}

static void store(Allocation *a, size_t offset, const Runs *what) {
    size_t length = 0;
    Runs all = {0};
    for (size_t i = 0; i < what->count; i++) length += what->runs[i].length;
    take(a, 0, offset, &all);
    for (size_t i = 0; i < what->count; i++) push(&all, what->runs[i]);
    take(a, offset + length, a->size - offset - length, &all);
    free(a->runs);
    a->runs = all.runs, a->count = (int)all.count;
    size_t where = 0;
    for (int i = 0; i < a->count; i++) a->runs[i].offset = where, where += a->runs[i].length;
}

static void fill(Allocation *a, size_t offset, size_t length, uint32_t word) {
    Runs one = {0};
    push(&one, (Run){0, length, 0, NULL, word});
    store(a, offset, &one);
    free(one.runs);
}

static void materialise(const Run *r, unsigned char *to) {
    const unsigned char *from = r->block ? r->block->bytes : (const unsigned char *)&r->word;
    size_t step = period(r), done = 0, phase = r->phase;
    while (done < r->length) {
        size_t n = step - phase < r->length - done ? step - phase : r->length - done;
        memcpy(to + done, from + phase, n);
        done += n, phase = 0;
        /* Once a whole period stands there it is doubled in place: a short period would otherwise be copied 4 bytes at a time. */
        if (step <= 64 && done >= step && done < r->length) {
            size_t whole = done / step * step, start = done - whole;
            while (done < r->length) {
                n = done - start < r->length - done ? done - start : r->length - done;
                memcpy(to + done, to + start, n);
                done += n;
            }
        }
    }
}

/* Whether length bytes repeat a kept block, and from which phase. */
static int repeats(const unsigned char *bytes, size_t length, Block **block, size_t *phase) {
    if (length < 64) return 0;
    for (Block *b = blocks; b; b = b->next) {
        const unsigned char *found = b->length < 64 ? NULL : memmem(b->bytes, b->length, bytes, 64);
        if (!found) continue;
        size_t p = (size_t)(found - b->bytes), done = 0, at_ = p;
        while (done < length) {
            size_t n = b->length - at_ < length - done ? b->length - at_ : length - done;
            if (memcmp(b->bytes + at_, bytes + done, n)) break;
            done += n, at_ = 0;
        }
        if (done >= length) {
            *block = b, *phase = p;
            return 1;
        }
    }
    return 0;
}

static void upload(Allocation *a, size_t offset, const unsigned char *bytes, size_t length) {
    Runs one = {0};
    Run run = {0, length, 0, NULL, 0};
    if (!repeats(bytes, length, &run.block, &run.phase)) {
        Block *b = malloc(sizeof *b);
        if (!b || !(b->bytes = malloc(length))) die("out of host memory");
        memcpy(b->bytes, bytes, b->length = length);
        b->next = blocks, blocks = b;
        run.block = b, run.phase = 0;
    }
    push(&one, run);
    store(a, offset, &one);
    free(one.runs);
}

/* --------------------------------------------------------------------------------------- contexts, streams and events */

enum { CONTEXT = 0x43545800, STREAM, EVENT, MODULE, FUNCTION };
struct CUctx_st { int magic, device, dead; int peers[MAX_DEVICES]; };
struct CUstream_st { int magic, device, pending, hung; double ns; struct CUstream_st *next; };
struct CUevent_st { int magic; double ns; };
struct CUmod_st { int magic, device; };
struct CUfunc_st { int magic, device, width; };

static struct CUctx_st contexts[MAX_DEVICES];
static struct CUstream_st *streams;
static struct CUctx_st *current;
static int copies;

#define HANDLE(handle, kind) \
    do { \
        if (!(handle) || (handle)->magic != (kind)) die("%s: not a handle of that kind", __func__); \
    } while (0)
#define READY() \
    do { \
        if (!ready) return 3; \
    } while (0)
/* A context, and it is alive: after an error like 700 every call of it gives that error again. */
#define CURRENT() \
    do { \
        READY(); \
        if (!current) return 201; \
        if (current->dead) return current->dead; \
    } while (0)

static void *make(size_t size, int magic) {
    int *made = calloc(1, size);
    if (!made) die("out of host memory");
    *made = magic;
    return made;
}

static void put_named(FILE *file, const char *text, const char *end, const char *initiator) {
    for (const char *c = text; c < end; c++)
        if (c[0] == '%' && c[1] == 'a') fputs(initiator, file), c++;
        else fputc(*c, file);
}

static void kernel_line(const char *text, const char *initiator) {
    FILE *file = fopen(kmsg, "a+");
    long sequence = 0;
    for (int c; file && (c = fgetc(file)) != EOF;) sequence += c == '\n';
    if (!file) die("the plan has a line for the kernel's log, and no kmsg file that can be written");
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    fprintf(file, "4,%ld,%lld,-;", sequence, (long long)t.tv_sec * 1000000 + t.tv_nsec / 1000);
    put_named(file, text, text + strlen(text), initiator);
    fputc('\n', file);
    fclose(file);
}

/* One write, at once: a file of sysfs takes a word only as that. */
static void poke(const char *text, const char *initiator) {
    const char *space = strchr(text, ' ');
    if (!space) die("poke: no word to write in: %s", text);
    char path[600] = "";
    FILE *name = fmemopen(path, sizeof path, "w");
    put_named(name, text, space, initiator);
    fclose(name);
    int file = open(path, O_WRONLY);
    if (file < 0 || write(file, space + 1, strlen(space + 1)) < 0) die("poke: %s cannot be written: %s", path, strerror(errno));
    close(file);
}

/* As a driver that is stuck in the kernel: the plan's folder has the state, since nobody but the kernel can make a real one. */
static void stall(void) {
    char path[600];
    snprintf(path, sizeof path, "%s/%d", proc_folder, (int)getpid());
    mkdir(path, 0700);
    strncat(path, "/stat", sizeof path - strlen(path) - 1);
    FILE *file = fopen(path, "w");
    if (!file) die("the plan has a stall, and no proc folder that can be written");
    fprintf(file, "%d (python3) D 1 1 1 0 -1\n", (int)getpid());
    fclose(file);
    for (;;) pause();
}

static int others_pending(const struct CUstream_st *own) {
    for (struct CUstream_st *s = streams; s; s = s->next)
        if (s != own && s->pending) return 1;
    return 0;
}

static int applies(Fault *f, int src, int dst, const char *path, size_t size, const struct CUstream_st *stream) {
    int peer = !strcmp(f->path, "peer") && strcmp(path, "local");
    if (!fits(f->src, devices[src].pci) || !fits(f->dst, devices[dst].pci) || (!peer && strcmp(f->path, path))) return 0;
    if (size < f->low || size > f->high || (f->together && !others_pending(stream))) return 0;
    return ++f->hits > f->from;
}

static void damage(const Fault *f, Allocation *to, size_t offset, size_t size, Allocation *from, size_t begin, Runs *data, int *write) {
    if (!strcmp(f->kind, "lost")) *write = 0;
    else if (!strcmp(f->kind, "zeros")) {
        data->count = 0;
        push(data, (Run){0, size, 0, NULL, 0});
    } else if (!strcmp(f->kind, "shift")) {
        /* The right bytes, some bytes too far. */
        store(to, offset + (size_t)atol(f->argument), data);
        *write = 0;
    } else if (!strcmp(f->kind, "garbage") || !strcmp(f->kind, "once-wrong")) {
        size_t words = (size_t)atol(f->argument);
        if (!strcmp(f->kind, "once-wrong")) {
            if (!access(f->argument, F_OK)) return;
            FILE *file = fopen(f->argument, "w");
            if (!file) die("cannot make %s", f->argument);
            fclose(file);
            words = 1;
        }
        if (words * 4 > size) words = size / 4;
        data->count = 0;
        push(data, (Run){0, 4 * words, 0, NULL, 0x5a5a5a5a});
        take(from, begin + 4 * words, size - 4 * words, data);
    }
}

/* One copy, now: what the plan does to it, the bytes, and the time that it takes on its stream. */
static CUresult copy(int src, int dst, int way, CUdeviceptr to, CUdeviceptr from, size_t size, struct CUstream_st *stream) {
    Allocation *target = at(to, size), *source = at(from, size);
    const Rule *speed = way == WAY_LOCAL ? rule("local", src, src) : rule("link", src, dst);
    double gbps = speed ? speed->first : way == WAY_LOCAL ? 1400 : 55, us = speed ? speed->second : way == WAY_LOCAL ? 2 : 0.45;
    int initiator = way == 1 || way == 3 ? dst : src, write = 1, error = 0;
    Runs data = {0};
    take(source, from - source->address, size, &data);
    for (int i = 0; i < fault_count; i++) {
        Fault *f = &faults[i];
        if (!applies(f, src, dst, WAYS[way], size, stream)) continue;
        if (!strcmp(f->kind, "error")) error = atoi(f->argument);
        else if (!strcmp(f->kind, "hang")) stream->hung = 1;
        else if (!strcmp(f->kind, "stall")) stall();
        else if (!strcmp(f->kind, "crash")) kill(getpid(), SIGSEGV);
        else if (!strcmp(f->kind, "gbps")) gbps = atof(f->argument);
        else if (!strcmp(f->kind, "line")) kernel_line(f->argument, devices[initiator].pci);
        else if (!strcmp(f->kind, "poke")) poke(f->argument, devices[initiator].pci);
        else damage(f, target, to - target->address, size, source, from - source->address, &data, &write);
    }
    if (error) {
        /* An illegal address or a failed launch takes the context with it; a refused mapping does not. */
        if (error >= 700 && error < 720 && error != 704 && error != 711) contexts[initiator].dead = error;
    } else if (write && !stream->hung) store(target, to - target->address, &data);
    free(data.runs);
    stream->pending = 1;
    /* A spread of one percent, the same in every run. */
    stream->ns += (us * 1e3 + (double)size / gbps) * (1 + 0.01 * (copies++ * 7 % 5 - 2) / 2);
    return error;
}

/* -------------------------------------------------------------------------------------------------- the driver's calls */

CUresult cuInit(unsigned int Flags) {
    if (Flags) return 1;
    if (!ready) read_plan();
    for (int i = 0; i < fault_count; i++)
        if (!strcmp(faults[i].path, "init")) {
            if (!strcmp(faults[i].kind, "error")) return atoi(faults[i].argument);
            if (!strcmp(faults[i].kind, "stall")) stall();
            if (!strcmp(faults[i].kind, "hang")) for (;;) pause();
        }
    ready = 1;
    return device_count ? 0 : 100;
}

CUresult cuDriverGetVersion(int *driverVersion) { *driverVersion = 13000; return 0; }

CUresult cuGetErrorName(CUresult error, const char **pStr) {
    static const struct { int code; const char *name; } names[] = {
        {2, "CUDA_ERROR_OUT_OF_MEMORY"}, {3, "CUDA_ERROR_NOT_INITIALIZED"}, {100, "CUDA_ERROR_NO_DEVICE"},
        {101, "CUDA_ERROR_INVALID_DEVICE"}, {201, "CUDA_ERROR_INVALID_CONTEXT"}, {205, "CUDA_ERROR_MAP_FAILED"},
        {217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"}, {600, "CUDA_ERROR_NOT_READY"}, {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
        {704, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED"}, {719, "CUDA_ERROR_LAUNCH_FAILED"}, {999, "CUDA_ERROR_UNKNOWN"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].code == (int)error) { *pStr = names[i].name; return 0; }
    *pStr = NULL;
    return 1;
}

CUresult cuDeviceGetCount(int *count) { READY(); *count = device_count; return 0; }

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    READY();
    if (ordinal < 0 || ordinal >= device_count) return 101;
    *device = ordinal;
    return 0;
}

CUresult cuDeviceGetName(char *name, int len, CUdevice dev) {
    READY();
    snprintf(name, (size_t)len, "%s", devices[dev].name);
    return 0;
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice dev) { READY(); memcpy(uuid->bytes, devices[dev].uuid, 16); return 0; }

CUresult cuDeviceGetPCIBusId(char *pciBusId, int len, CUdevice dev) {
    READY();
    snprintf(pciBusId, (size_t)len, "%s", devices[dev].pci);
    for (char *c = pciBusId; *c; c++)
        if (*c >= 'a' && *c <= 'f') *c = (char)(*c - 'a' + 'A'); /* as CUDA writes it */
    return 0;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice dev) { READY(); *bytes = devices[dev].memory; return 0; }

CUresult cuDeviceCanAccessPeer(int *canAccessPeer, CUdevice dev, CUdevice peerDev) {
    READY();
    *canAccessPeer = dev != peerDev && !rule("deny", dev, peerDev);
    return 0;
}

CUresult cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute attrib, CUdevice srcDevice, CUdevice dstDevice) {
    READY();
    const Rule *rank = rule("rank", srcDevice, dstDevice);
    if (srcDevice == dstDevice) return 101;
    *value = attrib == 1 ? (rank ? (int)rank->first : 0) : attrib == 2 ? !rule("deny", srcDevice, dstDevice) : 0;
    return 0;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev) {
    READY();
    if (dev < 0 || dev >= device_count) return 101;
    contexts[dev].magic = CONTEXT, contexts[dev].device = dev;
    for (int i = 0; i < fault_count; i++)
        if (!strcmp(faults[i].path, "context") && fits(faults[i].src, devices[dev].pci)) return atoi(faults[i].argument);
    *pctx = &contexts[dev];
    return 0;
}

CUresult cuCtxSetCurrent(CUcontext ctx) { READY(); HANDLE(ctx, CONTEXT); current = ctx; return ctx->dead; }

CUresult cuCtxEnablePeerAccess(CUcontext peerContext, unsigned int Flags) {
    CURRENT();
    HANDLE(peerContext, CONTEXT);
    if (Flags) return 1;
    if (rule("deny", current->device, peerContext->device)) return 217;
    if (current->peers[peerContext->device]) return 704;
    current->peers[peerContext->device] = 1;
    return 0;
}

CUresult cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize) {
    CURRENT();
    if (!bytesize) return 1;
    size_t used = bytesize;
    for (Allocation *a = allocations; a; a = a->next)
        if (a->device == current->device) used += a->size;
    if (used > devices[current->device].memory) return 2;
    Allocation *a = calloc(1, sizeof *a);
    if (!a) die("out of host memory");
    a->address = *dptr = next_address, a->size = bytesize, a->device = current->device;
    next_address += (bytesize + 0x1fffff) & ~(uint64_t)0x1fffff;
    a->next = allocations, allocations = a;
    fill(a, 0, bytesize, 0xcdcdcdcd); /* what a new allocation holds is not defined: neither zeros nor poison */
    return 0;
}

CUresult cuMemHostAlloc(void **pp, size_t bytesize, unsigned int Flags) {
    CURRENT();
    if (Flags & ~7u) return 1;
    *pp = aligned_alloc(4096, (bytesize + 4095) & ~(size_t)4095);
    return *pp ? 0 : 2;
}

CUresult cuMemsetD32Async(CUdeviceptr dstDevice, unsigned int ui, size_t N, CUstream hStream) {
    CURRENT();
    HANDLE(hStream, STREAM);
    Allocation *a = at(dstDevice, 4 * N);
    if (!a || dstDevice % 4 || a->device != current->device) return 1;
    fill(a, dstDevice - a->address, 4 * N, ui);
    return 0;
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount, CUstream hStream) {
    CURRENT();
    HANDLE(hStream, STREAM);
    Allocation *a = at(dstDevice, ByteCount);
    if (!a || a->device != current->device) return 1;
    upload(a, dstDevice - a->address, srcHost, ByteCount);
    return 0;
}

CUresult cuMemcpyDtoHAsync_v2(void *dstHost, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream) {
    CURRENT();
    HANDLE(hStream, STREAM);
    Allocation *a = at(srcDevice, ByteCount);
    if (!a || a->device != current->device) return 1;
    Runs data = {0};
    unsigned char *to = dstHost;
    take(a, srcDevice - a->address, ByteCount, &data);
    for (size_t i = 0; i < data.count; i++) materialise(&data.runs[i], to), to += data.runs[i].length;
    free(data.runs);
    return 0;
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream) {
    CURRENT();
    HANDLE(hStream, STREAM);
    Allocation *to = at(dstDevice, ByteCount), *from = at(srcDevice, ByteCount);
    if (!to || !from || to->device != from->device) return 1;
    return copy(from->device, to->device, WAY_LOCAL, dstDevice, srcDevice, ByteCount, hStream);
}

CUresult cuMemcpyPeerAsync(CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice, CUcontext srcContext,
                           size_t ByteCount, CUstream hStream) {
    CURRENT();
    HANDLE(dstContext, CONTEXT);
    HANDLE(srcContext, CONTEXT);
    HANDLE(hStream, STREAM);
    Allocation *to = at(dstDevice, ByteCount), *from = at(srcDevice, ByteCount);
    if (!to || !from || to->device != dstContext->device || from->device != srcContext->device) return 1;
    if (hStream->device != current->device) return 400;
    int pull = hStream->device == dstContext->device && dstContext != srcContext;
    if (!current->peers[pull ? srcContext->device : dstContext->device]) {
        /* Without peer access the driver goes through host memory: right, and slow. */
        Runs data = {0};
        take(from, srcDevice - from->address, ByteCount, &data);
        store(to, dstDevice - to->address, &data);
        free(data.runs);
        hStream->ns += 14e3 + (double)ByteCount / 12, hStream->pending = 1;
        return 0;
    }
    return copy(from->device, to->device, pull ? 1 : 0, dstDevice, srcDevice, ByteCount, hStream);
}

CUresult cuStreamCreate(CUstream *phStream, unsigned int Flags) {
    CURRENT();
    if (Flags & ~1u) return 1;
    *phStream = make(sizeof **phStream, STREAM);
    (*phStream)->device = current->device;
    (*phStream)->next = streams, streams = *phStream;
    return 0;
}

CUresult cuStreamQuery(CUstream hStream) {
    HANDLE(hStream, STREAM);
    if (hStream->hung) return 600;
    hStream->pending = 0;
    return contexts[hStream->device].dead;
}

CUresult cuEventCreate(CUevent *phEvent, unsigned int Flags) {
    CURRENT();
    if (Flags) return 1;
    *phEvent = make(sizeof **phEvent, EVENT);
    return 0;
}

CUresult cuEventRecord(CUevent hEvent, CUstream hStream) {
    HANDLE(hEvent, EVENT);
    HANDLE(hStream, STREAM);
    hEvent->ns = hStream->ns;
    return 0;
}

CUresult cuEventElapsedTime(float *pMilliseconds, CUevent hStart, CUevent hEnd) {
    HANDLE(hStart, EVENT);
    HANDLE(hEnd, EVENT);
    *pMilliseconds = (float)((hEnd->ns - hStart->ns) / 1e6);
    return 0;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    CURRENT();
    if (!strstr(image, ".entry proofbook_gate")) return 218; /* CUDA_ERROR_INVALID_PTX */
    for (int i = 0; i < fault_count; i++)
        if (!strcmp(faults[i].path, "module") && fits(faults[i].src, devices[current->device].pci)) return atoi(faults[i].argument);
    *module = make(sizeof **module, MODULE);
    (*module)->device = current->device;
    return 0;
}

CUresult cuModuleGetFunction(CUfunction *hfunc, CUmodule hmod, const char *name) {
    CURRENT();
    HANDLE(hmod, MODULE);
    int width = -1;
    if (!strcmp(name, "proofbook_gate")) width = 0;
    else if (sscanf(name, "proofbook_copy%d", &width) != 1) return 500; /* CUDA_ERROR_NOT_FOUND */
    *hfunc = make(sizeof **hfunc, FUNCTION);
    (*hfunc)->device = hmod->device, (*hfunc)->width = width;
    return 0;
}

CUresult cuLaunchKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ, unsigned int blockDimX,
                        unsigned int blockDimY, unsigned int blockDimZ, unsigned int sharedMemBytes, CUstream hStream,
                        void **kernelParams, void **extra) {
    CURRENT();
    HANDLE(f, FUNCTION);
    HANDLE(hStream, STREAM);
    if (!gridDimX || gridDimY != 1 || gridDimZ != 1 || !blockDimX || blockDimX > 1024 || blockDimY != 1 || blockDimZ != 1) return 1;
    if (sharedMemBytes || extra || !kernelParams || f->device != current->device || hStream->device != current->device) return 1;
    if (!f->width) return 0; /* the gate: computed time needs no holding back */
    uint64_t to = *(uint64_t *)kernelParams[0], from = *(uint64_t *)kernelParams[1];
    size_t size = *(uint64_t *)kernelParams[2] * (size_t)f->width;
    Allocation *target = at(to, size), *source = at(from, size);
    int own = current->device, peer = target && target->device != own ? target->device : source ? source->device : own;
    if (!target || !source || to % (unsigned)f->width || from % (unsigned)f->width || (peer != own && !current->peers[peer]) ||
        (target->device != own && source->device != own))
        return current->dead = 700;
    int way = peer == own ? WAY_LOCAL : target->device == own ? 3 : 2;
    return copy(source->device, target->device, way, to, from, size, hStream);
}
