/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Entries for functions with unknown parameters: entry i stores 1 in `due` of every device's counters and jumps to
 * vgpu_newer_functions[i]. It changes no register that may carry a parameter, and nothing on the stack.
 */
    .section .note.GNU-stack, "", %progbits
    .text
    .hidden vgpu_newer_functions
    .hidden vgpu_newer_entries
    .hidden vgpu_counters
    .globl vgpu_newer_entries
    .type vgpu_newer_entries, %object

#define ENTRIES 64
#define DEVICES 16
#define DUE 8
#define COUNTERS 64

#if defined(__x86_64__)

    .p2align 5
vgpu_newer_entries:
    .cfi_startproc
    .set entry, 0
    .rept ENTRIES
    .p2align 5
    endbr64
    leaq vgpu_newer_functions + 8 * entry(%rip), %r11
    jmp mark
    .set entry, entry + 1
    .endr
    .p2align 5
    .size vgpu_newer_entries, . - vgpu_newer_entries
mark:
    .set device, 0
    .rept DEVICES
    movl $1, vgpu_counters + COUNTERS * device + DUE(%rip)
    .set device, device + 1
    .endr
    jmpq *(%r11)
    .cfi_endproc

#elif defined(__aarch64__)

    .p2align 5
vgpu_newer_entries:
    .cfi_startproc
    .set entry, 0
    .rept ENTRIES
    .p2align 5
    hint #34 /* bti c */
    adrp x16, vgpu_newer_functions
    add x16, x16, #:lo12:vgpu_newer_functions
    ldr x16, [x16, #8 * entry]
    b mark
    .set entry, entry + 1
    .endr
    .p2align 5
    .size vgpu_newer_entries, . - vgpu_newer_entries
mark:
    adrp x17, vgpu_counters
    add x17, x17, #:lo12:vgpu_counters
    mov w9, #1
    .set device, 0
    .rept DEVICES
    str w9, [x17, #COUNTERS * device + DUE]
    .set device, device + 1
    .endr
    br x16
    .cfi_endproc

#else
#error "newer_entry.S knows x86-64 and aarch64 only"
#endif
